#!/usr/bin/env bash
# Installs all it needs, then runs linters, types, a spell check and all tests. Arguments go to pytest:
# bash tests/test.sh -k layout
#
#     bash tests/test.sh fast   only the conformance suites and the tests of what is pure data: a minute
#     bash tests/test.sh gpu    only what needs GPUs, with the Python that is active, or what train/install_gpu.sh made
set -euo pipefail
if [ "${1:-}" = gpu ]; then
    cd "$(dirname "$0")/.."
    shift
    [ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || . .venv/bin/activate # what train/install_gpu.sh made
    exec bash tests/gpu.sh "$@"
fi
. "$(dirname "$0")/../train/venv.sh" dev
# Without what it requires, which would overwrite the NCCL of a CUDA build of torch. There are wheels for Python 3.11.
python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: bmtrain==1.0.1 ||
    echo "BMTrain has no wheel for this Python: tests of its engine will be skipped" >&2
python -m pip install --quiet --disable-pip-version-check --no-deps model-center==1.0.2
# Tests start hundreds of processes. None of them compiles the project again if the first may keep what it compiled.
unset PYTHONDONTWRITEBYTECODE
check() {
    ruff check . && ruff format --check . && mypy && codespell
}
if [ "${1:-}" = fast ]; then
    shift
    check
    data=(mask layout tiling routes program merge package)
    exec python -m pytest --numprocesses 2 --dist loadfile -k "not triton" tests/conformance \
        $(printf "tests/test_%s.py " "${data[@]}") "$@"
fi
# The checks take one core, while the tests start on the other.
said=$(mktemp)
trap 'rm -f "$said"' EXIT
check >"$said" 2>&1 &
# A file at a time on each of four workers, on two cores: many tests wait for processes that they start.
code=0
python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder "$@" || code=$?
checked=0
wait $! || checked=$?
cat "$said"
exit $((code ? code : checked))
