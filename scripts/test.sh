#!/usr/bin/env bash
# The whole suite. First what starts no cluster and no engine, two files at a time; then what does, one test after the
# other: two engines on two cores wait for each other, and tests of failure would see each other's load. Both parts are
# run in any case; the exit code is not 0 when one of them failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${VENV:-.venv}/bin/python"
clusters='ray or vllm'

# 5: no test was selected, as with "-k name"; an error only when neither part has one.
selected=0 failed=0
run() {
    "$python" -m pytest "$@"
    case $? in
        0) selected=1 ;;
        5) ;;
        *) selected=1 failed=1 ;;
    esac
}

run -m "not ($clusters)" -n 2 --dist loadfile "$@"
run -m "$clusters" "$@"
((failed == 0 && selected == 1))
