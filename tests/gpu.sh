#!/usr/bin/env bash
# The GPU tests, for `bash tests/test.sh gpu`. Arguments go to pytest.
#
# Starting cold, most of the time goes into compiling kernels, each on one core. Many pytest workers share the GPUs, each
# with a stretch of the tests and so with kernels of its own, and keep them on disk for all. Beside them run the tests
# that start ranks, and after these one at a time those that measure time or memory.
set -euo pipefail
python3 -c 'import pytest, xdist' || { echo "test.sh: needs the packages pytest and pytest-xdist" >&2; exit 1; }
workers=$(python3 - <<'COUNT'
import os
import torch

gpus = torch.cuda.device_count()
if not gpus:
    raise SystemExit("test.sh: torch sees no GPU")
memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus))
print(max(1, min(len(os.sched_getaffinity(0)) * 3 // 4, gpus * memory // (10 << 30))))
COUNT
)
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
# A core for each process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0 # until a part fails, or where none has a test
empty=0
# Adds up exit codes of pytest: 5 means that a part has none of the tests that were asked for.
note() {
    if [ "$1" -eq 5 ]; then empty=$((empty + 1)); elif [ "$1" -ne 0 ]; then failed=$1; fi
    [ "$empty" -lt 3 ] || failed=5
}
summary() { tail -n 1 "$logs/$1" | tr -d '=' | xargs; }

echo "test.sh: $workers workers, and 5 that start ranks"
# More runs of ranks at a time would wait for their turns on a GPU at each message.
python3 -m pytest -m "gpu and ranks and not alone" --numprocesses 5 --maxschedchunk 1 "$@" >"$logs/ranks" 2>&1 &
ranks=$!
code=0
python3 -m pytest -m "gpu and not ranks and not alone" --numprocesses "$workers" --dist worksteal "$@" |
    tee "$logs/one" || code=$?
note "$code"
code=0
wait "$ranks" || code=$?
note "$code"
cat "$logs/ranks"
code=0
python3 -m pytest -m "gpu and alone" "$@" | tee "$logs/alone" || code=$?
note "$code"
echo "GPU tests in $SECONDS s: $(summary one); ranks: $(summary ranks); alone: $(summary alone)"
exit "$failed"
