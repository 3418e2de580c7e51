#!/usr/bin/env bash
# Lets one machine's GPUs look like those of two hosts, to NCCL and to bmt_burst: what crosses goes through sockets. A slow
# link to measure double rings on: bench/bench.sh --two-hosts. As the program that torchrun starts:
#
#     torchrun --nproc-per-node 4 --no-python bench/two_hosts.sh python3 bench/attention.py ...
set -euo pipefail
if [ "${LOCAL_WORLD_SIZE:?is set by torchrun}" -lt 4 ] || [ $((LOCAL_WORLD_SIZE % 2)) -ne 0 ]; then
    echo "two_hosts.sh: two hosts with a ring each need an even number of ranks, 4 or more, not $LOCAL_WORLD_SIZE" >&2
    exit 2
fi
export NCCL_HOSTID=host$((LOCAL_RANK / (LOCAL_WORLD_SIZE / 2))) NCCL_SOCKET_IFNAME=lo
exec "$@"
