#!/usr/bin/env bash
# Make .venv from the lock. Does nothing when it was made from the same lock before.
#
#   PYTHON=python3.11   interpreter to use
#   VENV=.venv          where to put it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3.11}"
venv="${VENV:-.venv}"
stamp="$venv/.setup-stamp"
inputs=(requirements/cpu.txt requirements/dev.txt pyproject.toml plugins/hetero-llm-sim/pyproject.toml scripts/setup.sh)
pip_version=26.3
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$1" >&2
    printf '  next: %s\n' "${@:2}" >&2
    exit 1
}

# The place counts too: console scripts hold the absolute path of their interpreter.
wanted_stamp() {
    { cat "${inputs[@]}"; pwd; } | sha256sum | cut -d ' ' -f 1
}

is_done() {
    [[ -x "$venv/bin/hetero-llm" && -f "$stamp" && "$(<"$stamp")" == "$(wanted_stamp)" ]]
}

require_python() {
    command -v "$python" >/dev/null || die "$python is not installed" \
        "install CPython 3.11, for example: apt install python3.11 python3.11-venv" \
        "or name it: make setup PYTHON=/path/to/python3.11"
    local found
    found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || die "$python does not run" "make setup PYTHON=..."
    [[ "$found" == 3.11 ]] || die "$python is Python $found; the lock is for 3.11" "make setup PYTHON=/path/to/python3.11"
}

make_venv() {
    [[ -x "$venv/bin/python" ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null && return
    say "making $venv"
    "$python" -m venv --clear "$venv" || die "$python cannot make a virtual environment" \
        "install its venv package, for example: apt install python3.11-venv"
}

# Twice quiet: pip warns once per package and index that does not have it. Errors are still shown.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

install_lock() {
    pip install -qq --no-deps -r requirements/cpu.txt -r requirements/dev.txt "$@"
}

# Look before installing: 2.8 GB are not to be fetched twice because of one package.
index_has_torch() {
    local torch
    torch="$(grep -E '^torch==' requirements/cpu.txt)"
    "$venv/bin/python" -m pip show torch 2>/dev/null | grep -qx "Version: ${torch#torch==}" ||
        pip download -qq --no-deps --dest "$1" "$torch" 2>"$1/error"
}

main() {
    is_done && return
    require_python
    make_venv
    rm -f "$stamp"
    say "installing the locked packages into $venv; the first time this takes some minutes"
    pip install -qq "pip==$pip_version" || say "keeping the pip that is there"
    local scratch extra=()
    scratch="$(mktemp -d)"
    # shellcheck disable=SC2064
    trap "rm -rf '$scratch'" EXIT
    if index_has_torch "$scratch"; then
        extra=(--find-links "$scratch")
    else
        say "the configured package index has no $(grep -E '^torch==' requirements/cpu.txt):"
        say "taking it from PyTorch's own CPU index, $torch_index"
        extra=(--extra-index-url "$torch_index")
    fi
    install_lock "${extra[@]}" || die "installing the locked packages failed; pip's message is above" \
        "check the network and pip's index settings: $venv/bin/pip config list" "then run it again: what is there is kept"
    # The simulator is a distribution of its own, like any vendor's plugin.
    pip install -qq --no-deps --no-build-isolation -e . -e plugins/hetero-llm-sim || die "installing hetero-llm itself failed" "make clean setup"
    wanted_stamp >"$stamp"
    say "done"
}

main
