#!/usr/bin/env bash
# Sets up and runs every check; stops at the first that fails, and says which.
# usage: scripts/test.sh [--venv DIR] [pytest arguments]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=()
case "${1:-}" in
    --venv)
        setup=("$@")
        setup=("${setup[@]:0:2}")
        shift "${#setup[@]}"
        ;;
    --venv=*)
        setup=("$1")
        shift
        ;;
esac
venv="$(scripts/setup.sh ${setup[@]+"${setup[@]}"} | tail -n 1)"
export PATH="$venv/bin:$PATH"

log="$(mktemp)"
trap 'rm -f "$log"' EXIT

# stage NAME COMMAND...
stage() {
    local name="$1" code=0
    shift
    printf -- '--- %s\n' "$name"
    "$@" 2>&1 | tee "$log" || code=$?
    # Status 5: the arguments select no test of this stage.
    if ((code == 5)) && [[ "$name" == *tests && -n "$selected" ]]; then
        code=0
    fi
    if ((code)); then
        printf 'test.sh: %s failed (exit status %d)\n' "$name" "$code"
        # The closing line of pytest comes last.
        if [[ "$name" == *tests ]]; then
            tail -n 1 "$log"
        fi
        exit "$code"
    fi
}

selected="$*"
parallel=()
if python -c 'import xdist' 2>/dev/null; then
    parallel=(-n 2)
fi

if [[ -f scripts/make_debug_assets.py ]]; then
    stage "assets" python scripts/make_debug_assets.py
fi
stage "ruff check" ruff check .
stage "ruff format" ruff format --check .
stage "mypy" mypy
stage "unit tests" python -m pytest ${parallel[@]+"${parallel[@]}"} tests/unit "$@"
stage "integration tests" python -m pytest -m integration tests/integration "$@"
