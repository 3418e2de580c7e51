"""Checks that a strategy can run with the other options, before anything is trained."""

from __future__ import annotations

from typing import Protocol

import torch

from bmt_burst import Layout, Scores, kernels, strategies
from bmt_burst.sequence.mask import Mask
from bmt_burst.spec import Spec
from train.base.wording import counted


class GroupOptions(Protocol):
    """The options that group ranks, a part of TrainConfig's."""

    @property
    def seq_len(self) -> int: ...
    @property
    def sp_size(self) -> int: ...
    @property
    def strategy(self) -> str: ...
    @property
    def inner_size(self) -> int | None: ...
    @property
    def ulysses_size(self) -> int | None: ...


def check_groups(config: GroupOptions) -> int:
    """Return the ranks of a group. Raises ValueError for options that do not go together."""
    inner, ulysses, ranks = config.inner_size, config.ulysses_size, config.sp_size
    if inner is not None and ulysses is not None:
        raise ValueError(
            "--inner-size and --ulysses-size both say which ranks are a group: give one of them"
        )
    if ulysses is not None and config.strategy not in ("auto", "usp"):
        raise ValueError(f"--ulysses-size is for --strategy usp, got --strategy {config.strategy}")
    if inner not in (None, 1, ranks) and config.strategy == "ulysses":
        raise ValueError(
            "--strategy ulysses takes all ranks as one group: leave out --inner-size, or choose usp"
        )
    if config.seq_len < ranks:
        raise ValueError(
            f"--seq-len {config.seq_len} is too short for {counted(ranks, 'rank')}; the smallest "
            f"is {ranks}"
        )
    for name, size in (("--inner-size", inner), ("--ulysses-size", ulysses)):
        if size is not None and ranks % size:
            raise ValueError(f"{name} {size} does not divide --sp-size {ranks}")
    if ulysses is None and inner == 1:
        return ranks  # a ring of hosts with a rank each is one ring
    return ulysses or inner or ranks


def check_strategy(
    strategy: str,
    layout: str,
    seq_len: int,
    ranks: int,
    group_size: int,
    scores: Scores | None = None,
) -> None:
    """Raise ValueError, with the reason, if a strategy refuses what the options ask for.

    group_size  consecutive ranks that are a group: the ranks of a host, or --ulysses-size ranks
    scores      of an example row, for models that add a learned bias to the scores
    """
    if strategy == "auto":
        return
    # Strategies do not refuse numbers of heads or dtypes, so these are examples.
    sizes = strategies.Sizes(1, ranks, ranks, 16, torch.float32, torch.float32)
    problem = strategies.Problem(
        mask=scores.mask if scores else Mask.causal(seq_len),
        layout=Layout.named("zigzag" if layout == "auto" else layout, seq_len, ranks),
        spec=Spec(1.0),
        kernel=kernels.load("reference"),
        sizes=sizes,
        inner=group_size,
        outer=ranks // group_size,
        scores=scores,
    )
    if reason := strategies.load(strategy).refuses(problem):
        options = f"--strategy {strategy}"
        if layout != "auto":
            options += f" with --layout {layout}"
        raise ValueError(f"{options}, --seq-len {seq_len} and --sp-size {ranks}: {reason}")
