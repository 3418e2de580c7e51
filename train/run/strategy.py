"""Checks that a strategy can run with the other options, before anything is trained."""

from __future__ import annotations

import torch

from bmt_burst import Layout, Scores, kernels, strategies
from bmt_burst.sequence.mask import Mask
from bmt_burst.spec import Spec


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
