#!/usr/bin/env bash
# Runs the tests of models and loading with the oldest and the newest transformers that pyproject.toml
# allows, or with the versions named as arguments. Each version is laid over .venv in a folder of its
# own, which is deleted afterwards; .venv itself stays as it is. (SmolLM2 is left out: its folder was
# written by the pinned version, and older ones can't read its tokenizer.)
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
oldest=$(sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
newest=$("$python" -m pip index versions transformers 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p')
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=("$oldest" "$newest")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# What comes with transformers follows it; everything else stays at the pinned version.
grep -vE '^(transformers|huggingface-hub|tokenizers|httpx|click)' constraints.txt > "$work/constraints.txt"

export OMP_NUM_THREADS=1
failed=()
for version in "${versions[@]}"; do
    overlay=$work/$version
    "$python" -m pip install -q -q --disable-pip-version-check --target "$overlay" \
        --constraint "$work/constraints.txt" "transformers==$version"
    echo "== transformers $version"
    PYTHONPATH=$overlay "$python" -c "import transformers; assert transformers.__version__ == '$version'"
    tests=(tests/engine/test_{families,fusion,rotary,loader}.py)
    if [ "$(printf '%s\n' 5.6 "$version" | sort -V | head -1)" = 5.6 ]; then  # refused below
        tests+=(tests/engine/test_gguf.py)
    fi
    PYTHONPATH=$overlay "$python" -m pytest -q -p no:cacheprovider -k "not smollm2" "${tests[@]}" \
        || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with transformers ${failed[*]}" >&2; exit 1; }
