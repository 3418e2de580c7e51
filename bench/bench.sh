#!/usr/bin/env bash
# Measure attention on this machine's GPUs, next to the peers that are installed, and write tables and plots. On a single
# GPU: the kernel, and one rank of eight whose peers are imagined (bench/one_rank.py).
#
#     bash bench/bench.sh [--quick [--all] | --two-hosts | --usp] [--gpus N]
#
#     --quick      the kernel alone, ours, Ulysses and torch's context_parallel, at two lengths with 32:8 heads, in a few
#                  minutes
#     --all        with --quick: all variants of ours and all peers, 32:32 heads too, packed documents, the links
#     --two-hosts  the GPUs' halves look like two hosts with a slow link between them (bench/two_hosts.sh): the single
#                  ring against the double one, and what is cheaper to send in the backward
#     --usp        a table of ring degree x Ulysses degree, for each way to cut two or more GPUs (bench/usp.py)
#     --gpus N     on N GPUs; by default on all
#
# Without an option it measures everything at five lengths, batches, documents and windows. That takes half an hour and
# more on eight GPUs, most of it for a million tokens.
#
# It takes the Python that is active, else the one that train/install_gpu.sh made. Without torch, it installs it. Raw rows
# go to bench/results/, and bench/attention.py describes them. On a machine without GPUs it runs a tiny version, which
# does not measure speed.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "usage: bench.sh [--quick [--all] | --two-hosts | --usp] [--gpus N]; --help explains them" >&2; exit 2; }
quick= all= two_hosts= usp= gpus=
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=1 ;;
        --all) all=1 ;;
        --two-hosts) two_hosts=1 ;;
        --usp) usp=1 ;;
        --gpus) gpus=${2:?--gpus needs a number}; shift ;;
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' bench/bench.sh; exit ;;
        *) usage ;;
    esac
    shift
done
[ $((quick + two_hosts + usp)) -le 1 ] || usage
[ -z "$all" ] || [ -n "$quick" ] || usage
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
# One process, because each import of torch takes seconds on a cold machine.
find_gpus() {
    python3 -c "import torch
count = torch.cuda.device_count()
print(count, torch.cuda.get_device_name().replace(' ', '-').lower() if count else 'cpu')" 2>/dev/null
}
facts=$(find_gpus) || { . train/venv.sh train; facts=$(find_gpus); }
found=${facts%% *} name=${facts#* }
if [ "$found" -eq 0 ]; then gpus=${gpus:-$((two_hosts || usp ? 4 : 2))}; fi
gpus=${gpus:-$found}
if [ "$found" -gt 0 ] && [ "$gpus" -gt "$found" ]; then
    echo "bench.sh: --gpus $gpus, but this machine has $found" >&2
    exit 2
fi
refuse_gpus "$gpus"
kind=attention
[ -z "$usp" ] || kind=usp
output=bench/results/$kind-$gpus-$name-$(date +%Y%m%d-%H%M%S).jsonl

arguments=() packed=() one_rank=() masks=(documents window)
if [ "$found" -eq 0 ]; then
    output=$(mktemp -d)/$kind-cpu.jsonl
elif [ -n "$quick" ] && [ -z "$all" ]; then
    arguments=(--tokens-per-gpu 8192 32768 --heads 32:8)
    one_rank=("${arguments[@]}" --variants bmt_burst)
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
if [ "$gpus" -eq 1 ]; then
    arguments+=(--implementations bmt_burst)
elif [ -n "$quick" ] && [ -z "$all" ]; then
    arguments+=(--implementations bmt_burst ulysses "torch context_parallel" --no-links)
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
    ranks "$gpus" bench/attention.py --output "$output" "${arguments[@]}"
    if [ "$gpus" -eq 1 ]; then
        ranks 1 bench/one_rank.py --output "$output" "${one_rank[@]}"
    elif [ -z "$quick" ] || [ -n "$all" ]; then
        ranks "$gpus" bench/attention.py --output "$output" --masks "${masks[@]}" --no-links \
            --implementations bmt_burst ulysses "${packed[@]}"
    fi
fi
[ ! -f "$output" ] || python3 bench/report.py "$output"
exit $status
