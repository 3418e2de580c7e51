"""The assumptions of a plan, with the alternatives: its attention, positions and hosts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from train.settings.config import remark_length

from .search import Planned, as_run, plan, recommend, with_options

_SPARSE_RELEASES = ("minicpm4-8b",)  # dense presets whose release also has InfLLM-V2


def describe_assumptions(planned: Planned, tokens: float | None) -> Iterator[str]:
    """Yield a line for each assumption. A run may have so many `tokens`."""
    yield f"attention: {_describe_attention(planned, tokens)}"
    if remark := remark_length(planned.config, planned.model):
        yield f"positions: {remark}"
    if planned.cluster.hosts > 1:
        yield f"{planned.cluster.hosts} hosts: {_describe_sends(planned)}"
    yield from _compare_within_hosts(planned, tokens)
    if (chunk := planned.config.tokens_of_chunk) is not None:
        found = recommend(with_options(planned, chunk=None))
        other = found and found.config.chunk
        named = f"with --chunk {other}" if other else "without"
        comparison = "as recommended" if other == chunk else _compare(planned, found, named, tokens)
        yield f"chunks of {chunk:,} tokens; {comparison}"


def _describe_attention(planned: Planned, tokens: float | None) -> str:
    """Return the kind of attention, and the speed with the other kind that the model has."""
    config, model = planned.config, planned.model
    if model.sparse is not None and model.infllm is None:
        return f"{model.sparse.kind} is planned as dense attention"
    if model.infllm is not None and model.infllm.is_dense(config.seq_len):
        return f"dense; InfLLM-V2 is for {model.infllm.dense_len:,} tokens and more"
    if model.infllm is not None:
        kind, other = "sparse (InfLLM-V2)", {"dense_len": config.seq_len + 1}
    elif config.model in _SPARSE_RELEASES and not config.init_from and config.window is None:
        kind, other = "dense", {}
    else:
        return "dense"
    same = with_options(planned, sparse=other)
    found = same if same.fits else recommend(same)
    named = f"with --sparse '{json.dumps(other)}'{'' if other else ' (InfLLM-V2)'}"
    return f"{kind}; {_compare(planned, found, named, tokens)}"


def _compare(planned: Planned, other: Planned | None, named: str, tokens: float | None) -> str:
    """Return the speed with the options `named`, compared with that of `planned`."""
    if other is None:
        return f"{named}: no options fit"
    other = as_run(other)
    theirs, here = (f"{x.tokens_per_s:,.0f} tokens/s" for x in (other, planned))
    if tokens is not None:
        theirs = f"{theirs} ({other.days(tokens):,.1f} days)"
        here = f"{here} ({planned.days(tokens):,.1f} days)"
    return f"{named}: {theirs} instead of {here}"


def _describe_sends(planned: Planned) -> str:
    """Return the sends between hosts, with their time if the network is known."""
    rate = planned.cluster.network
    if rate is None:
        return "what they send to each other counts as free; --network of plan.py counts it"
    received = planned.received / 1e9
    return f"each receives {received:,.1f} GB a step: {received / rate:.2f} s at {rate:g} GB/s"


def _compare_within_hosts(planned: Planned, tokens: float | None) -> Iterator[str]:
    """Yield the speed with each sequence on one host, and at least as many sequences a step.
    Options for groups of ranks exclude it.
    """
    config, ranks = planned.config, planned.cluster.of_host
    if config.sp_size <= ranks or (config.inner_size, config.ulysses_size) != (None, None):
        return
    rows = planned.cluster.gpus // ranks * (config.micro_batch_size or 1)
    batch_size = -(-config.batch_size // rows) * rows
    other = dataclasses.replace(config, sp_size=ranks, batch_size=batch_size)
    found = recommend(plan(other, planned.cluster, planned.engine))
    named = f"with --sp-size {ranks} --batch-size {batch_size}"
    yield f"a sequence is on several hosts; {_compare(planned, found, named, tokens)}"
