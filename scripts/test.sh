#!/usr/bin/env bash
# The whole suite. First what may run beside other tests, three files at a time; then what is marked `alone`, one test after
# the other: two engines on two cores wait for each other, and tests of failure would see each other's load. Both parts are
# run in any case; the exit code is not 0 when one of them failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${VENV:-.venv}/bin/python"

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

# In the order of the files, which begins with the slow ones; xdist's own begins with those that have most tests.
run -m "not alone" -n 3 --dist loadfile --no-loadscope-reorder "$@"
run -m alone "$@"
((failed == 0 && selected == 1))
