r"""Plan a pretraining run without a GPU: memory, time and price, and the command that starts it.

    python train/plan.py --model minicpm4-8b --gpus 8 --gpu-memory 139 --seq-len 256K
    python train/plan.py --model llama3-8b --gpus 64 --gpu h100 --seq-len 128K --sp-size 8 \
        --tokens 100B --lr 3e-4 --price-per-gpu-hour 2.5

Lengths may be 128K or 1M, in powers of 1,024, and totals 100B, in powers of 1,000. Without
--seq-len it plans the longest sequence that fits without offloading. docs/planning.md has
the formula, and says how near plans are to measured runs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script()

from train.base.command_line import ArgumentParser, read_total
from train.planning.report import Budget, advice, describe, table
from train.planning.search import (
    Cluster,
    as_run,
    find_any_longest,
    free_host_gib,
    plan,
    recommend,
    with_options,
)
from train.planning.seconds import GPUS
from train.settings.config import TrainConfig
from train.settings.options import add_options

# The options of pretrain.py that matter for a plan. The others of what blocks save are found.
_OPTIONS = {
    *("model", "init_from", "accept_field", "untie", "rope_theta", "rope_scaling", "sparse"),
    *("window", "dtype", "fp8", "chunk"),
    *("seq_len", "batch_size", "micro_batch_size"),
    *("sp_size", "strategy", "inner_size", "ulysses_size", "engine", "offload_optimizer", "lr"),
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser("plan.py", __doc__, allow_abbrev=False)
    machine = parser.add_argument_group("the GPUs")
    machine.add_argument("--gpus", type=int, required=True, help="number of GPUs, over all hosts")
    machine.add_argument(
        "--gpu", choices=list(GPUS), default="h200", help="whose rates are used (default: h200)"
    )
    machine.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of a GPU; by default that of --gpu"
    )
    machine.add_argument(
        "--host-memory",
        type=float,
        metavar="GIB",
        help="memory of a host for each of its GPUs; by default that of this host if it has GPUs, "
        "else no limit",
    )
    machine.add_argument(
        "--network",
        type=float,
        metavar="GB/S",
        help="what a host receives from other hosts, in 10^9 bytes a second; by default sends "
        "between hosts count as free",
    )
    cost = parser.add_argument_group("the whole run")
    cost.add_argument("--tokens", type=read_total, help="tokens of the run, as in 1e11 or 100B")
    cost.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="in any currency")
    add_options(parser, _OPTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in _OPTIONS}
    try:
        hardware = GPUS[args.gpu]
        gib = hardware.gib if args.gpu_memory is None else args.gpu_memory
        cluster = Cluster(args.gpus, gib, hardware, args.host_memory, args.network)
        if cluster.host_gib is None:
            cluster = dataclasses.replace(cluster, host_gib=free_host_gib(cluster.of_host))
        budget = Budget(args.tokens, args.price_per_gpu_hour)
        for part in _report(given, cluster, budget):
            print(part, flush=True)
    except (ValueError, OSError) as error:
        parser.fail(error)
    return 0


def _report(given: dict[str, Any], cluster: Cluster, budget: Budget) -> Iterator[str]:
    """Yield the parts of the plan of a run with the options `given`."""
    sp_size = given.get("sp_size", cluster.gpus)
    groups = max(cluster.gpus // max(sp_size, 1), 1)
    sizes = {"sp_size": sp_size, "batch_size": groups, "micro_batch_size": 1, "dtype": "bf16"}
    seq_len = given.pop("seq_len", None)
    start = max(1024 * sp_size, 1024) if seq_len is None else seq_len
    config = TrainConfig(**(sizes | given), seq_len=start)
    engine = config.pick_engine(has_bmtrain=True)
    planned = plan(config, cluster, engine)
    if seq_len is None:
        longest = dataclasses.replace(config, seq_len=find_any_longest(planned))
        planned = plan(longest, cluster, engine)
    if budget.tokens is not None:
        steps = math.ceil(budget.tokens / (config.batch_size * planned.config.seq_len))
        planned = with_options(planned, steps=steps)
    found = recommend(planned)
    found = found and as_run(found)  # as pretrain.py runs it
    yield describe(found or planned, budget)
    yield f"\n{table(planned, found or planned)}"
    yield f"\n{advice(planned, found)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
