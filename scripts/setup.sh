#!/usr/bin/env bash
# Makes or reuses the virtual environment of this checkout.
# Progress goes to stderr; the last line of stdout is the environment's path.
set -euo pipefail

usage="usage: scripts/setup.sh [--venv DIR]
  --venv DIR  the virtual environment to make or use
              (default: \${XDG_CACHE_HOME:-~/.cache}/torchtitan-ft/venv-<hash of pyproject.toml>)"

exec 3>&1 1>&2

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

venv=""
while (($#)); do
    case "$1" in
        --venv)
            (($# > 1)) || fail "--venv needs a folder"
            venv="$2"
            shift 2
            ;;
        --venv=*)
            venv="${1#--venv=}"
            shift
            ;;
        -h | --help)
            printf '%s\n' "$usage"
            exit 0
            ;;
        *) fail "unknown argument '$1'"$'\n'"$usage" ;;
    esac
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
hash="$(sha256sum "$root/pyproject.toml" | cut -c1-12)"
: "${venv:=${XDG_CACHE_HOME:-$HOME/.cache}/torchtitan-ft/venv-$hash}"
mkdir -p "$(dirname "$venv")"
venv="$(cd "$(dirname "$venv")" && pwd -P)/$(basename "$venv")"

python="$venv/bin/python"
complete="$venv/.torchtitan-ft-complete-$hash"
ours="$venv.incomplete" # there while this script makes the environment: what is in it may be wiped

# Where the environment takes torchtitan_ft from; from /, as Python looks in the current folder first.
linked_to() {
    (cd / && env -u PYTHONPATH "$python" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("torchtitan_ft")
print(pathlib.Path(spec.origin).resolve().parents[1] if spec and spec.origin else "")
') 2>/dev/null || true
}

ready() { [[ -e "$complete" && -x "$python" && "$(linked_to)" == "$root" ]]; }

finish() {
    printf '%s\n' "$venv" >&3
    exit 0
}

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        # Run, not only found: a version manager's stand-in may have nothing behind it.
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
                printf '%s\n' "$name"
                return
            fi
            say "$name cannot make virtual environments (on Debian: apt install python3-venv)"
        fi
    done
    return 1
}

# The requirement of a name in pyproject.toml.
requirement() {
    "$python" - "$root/pyproject.toml" "$1" <<'EOF'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
for line in [*project["build-system"]["requires"], *project["project"]["dependencies"]]:
    if re.split(r"[^\w.-]", line)[0] == sys.argv[2]:
        print(line)
EOF
}

install() {
    if [[ -e "$ours" ]]; then
        say "an earlier setup was interrupted; starting again"
    fi
    if [[ -e "$ours" || ! -x "$python" ]]; then
        if [[ ! -e "$ours" && -d "$venv" && -n "$(ls -A "$venv")" ]]; then
            fail "$venv exists and is not a virtual environment"
        fi
        local base
        base="$(find_python)" || fail "needs Python 3.11 or newer (python3.11, python3.12, ..., python3)"
        say "making $venv with $("$base" --version)"
        touch "$ours"
        "$base" -m venv --clear "$venv"
    elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        fail "$venv has $("$python" --version); needs 3.11 or newer"
    fi
    say "installing torch and the rest (about 6 GB; some minutes)"
    pip install --upgrade "$(requirement setuptools)"
    pip install "$(requirement torch)"
    pip install -e "${root}[dev]"
    # Python may have been told to write no bytecode; imports of torch are slow without.
    say "compiling to bytecode"
    "$python" -m compileall -qq -j 0 "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" ||
        true # some packages carry templates that are not valid Python
    touch "$complete"
    rm -f "$ours"
}

# Without the lock first: a finished environment may lie where nobody may write.
if ready; then
    finish
fi

command -v flock >/dev/null || fail "needs flock (of util-linux)"
exec 9>"$venv.lock"
if ! flock -n 9; then
    say "waiting for another setup of $venv"
    flock 9
fi
if ready; then
    finish
fi
if [[ ! -e "$complete" || ! -x "$python" ]]; then
    install
fi
if [[ "$(linked_to)" != "$root" ]]; then
    say "linking $venv to $root"
    pip install --quiet --no-deps --no-build-isolation -e "$root"
fi
finish
