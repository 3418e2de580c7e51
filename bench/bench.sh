#!/usr/bin/env bash
# Measures attention on this machine's GPUs, beside the peers that are installed, and writes tables and plots. On a
# single GPU: the kernel, and one rank of eight whose peers are imagined (bench/one_rank.py).
#
#     bash bench/bench.sh [--quick | --two-hosts | --usp] [--gpus N]
#
# With --two-hosts the GPUs' halves look like two hosts with a slow link between them (bench/two_hosts.sh): the single ring
# against the double one, and what is cheaper to move in the backward. Without either it takes half an hour and more on
# eight GPUs, most of it for a million tokens; --quick takes a few minutes.
#
# With --usp it prints a table of ring degree x Ulysses degree, for each way to cut the GPUs (bench/usp.py). It needs two.
#
# Takes the Python that is active, or else what train/install_gpu.sh made; sets itself up where there is no torch. Raw rows
# go to bench/results/, see bench/attention.py for what they hold. On a machine without GPUs it runs a tiny version, which
# says nothing about speed.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "usage: bench.sh [--quick | --two-hosts | --usp] [--gpus N]" >&2; exit 2; }
quick= two_hosts= usp= gpus=
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --two-hosts) two_hosts=1 ;;
        --usp) usp=1 ;;
        --gpus) gpus=${2:?--gpus needs a number}; shift ;;
        *) usage ;;
    esac
    shift
done
[ -z "$usp" ] || [ -z "$quick$two_hosts" ] || usage
[ -z "$gpus" ] || [[ $gpus =~ ^[1-9][0-9]*$ ]] || usage
refuse_gpus() {
    if [ -n "$two_hosts" ] && { [ "$1" -lt 4 ] || [ $(($1 % 2)) -ne 0 ]; }; then
        echo "bench.sh: two hosts with a ring each need an even number of GPUs, 4 or more, not $1" >&2
        exit 2
    fi
    if [ -n "$usp" ] && [ "$1" -lt 2 ]; then
        echo "bench.sh: --usp cuts GPUs into rings and groups that share heads, so it needs two or more, not $1" >&2
        exit 2
    fi
}
[ -z "$gpus" ] || refuse_gpus "$gpus" # before anything is installed

[ -n "${VIRTUAL_ENV:-}" ] || [ ! -f .venv/bin/activate ] || . .venv/bin/activate
python3 -c "import torch" 2>/dev/null || . train/venv.sh train
found=$(python3 -c "import torch; print(torch.cuda.device_count())")
if [ "$found" -eq 0 ]; then gpus=${gpus:-$((two_hosts || usp ? 4 : 2))}; fi
gpus=${gpus:-$found}
if [ "$found" -gt 0 ] && [ "$gpus" -gt "$found" ]; then
    echo "bench.sh: --gpus $gpus, but this machine has $found" >&2
    exit 2
fi
refuse_gpus "$gpus"
name=$(python3 -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower() if torch.cuda.is_available() else 'cpu')")
kind=attention
[ -z "$usp" ] || kind=usp
output=bench/results/$kind-$gpus-$name-$(date +%Y%m%d-%H%M%S).jsonl

arguments=() packed=() one_rank=() masks=(documents window)
if [ "$found" -eq 0 ]; then
    output=$(mktemp -d)/$kind-cpu.jsonl
elif [ -n "$quick$two_hosts" ]; then
    arguments=(--tokens-per-gpu 8192 16384)
    packed=(--tokens-per-gpu 8192 --documents 4K) masks=(documents)
    one_rank=(--tokens-per-gpu 8192 16384 --variants bmt_burst)
else
    # 64K to 1M tokens on 8 GPUs, and batches of 64K
    arguments=(--tokens-per-gpu 8192 16384 32768 65536 131072 --batches 2 4 8 --masks causal full)
    packed=(--tokens-per-gpu 8192 32768)
    one_rank=(--tokens-per-gpu 8192 16384)
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1} # many processes, few kernels
echo "bench.sh: $gpus ranks, $found GPUs; rows go to $output"
status=0
ranks() { python3 -m torch.distributed.run --standalone --nproc-per-node "$@" || status=$?; }
if [ -n "$usp" ]; then
    ranks "$gpus" bench/usp.py --output "$output"
elif [ -n "$two_hosts" ]; then
    for inner_size in "$gpus" $((gpus / 2)); do
        ranks "$gpus" --no-python bench/two_hosts.sh python3 bench/attention.py --output "$output" --inner-size $inner_size \
            --errors 0 --implementations "bmt_burst q" "bmt_burst kv" "${arguments[@]}"
    done
else
    [ "$gpus" -gt 1 ] || arguments+=(--implementations bmt_burst)
    ranks "$gpus" bench/attention.py --output "$output" "${arguments[@]}"
    [ "$gpus" -le 1 ] || ranks "$gpus" bench/attention.py --output "$output" --masks "${masks[@]}" --no-links \
        --implementations bmt_burst "bmt_burst contiguous" ulysses "${packed[@]}"
    [ "$gpus" -gt 1 ] || ranks 1 bench/one_rank.py --output "$output" "${one_rank[@]}"
fi
[ ! -f "$output" ] || python3 bench/report.py "$output"
exit $status
