#!/usr/bin/env bash
# Lets one machine's GPUs look like those of two hosts, to NCCL and to bmt_burst: what crosses goes through sockets. A slow
# link to measure double rings on: bench/bench.sh --two-hosts. As the program that torchrun starts:
#
#     torchrun --nproc-per-node 4 --no-python bench/two_hosts.sh python3 bench/attention.py ...
set -euo pipefail
export NCCL_HOSTID=host$((LOCAL_RANK / (LOCAL_WORLD_SIZE / 2))) NCCL_SOCKET_IFNAME=lo
exec "$@"
