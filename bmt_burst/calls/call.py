"""The steps of a call.

1. `check_inputs` checks the tensors of this rank. `find_terms` checks its options, and finds
   everything that ranks must agree on.
2. `gather_terms` sends the terms to the other ranks, or the error if a check failed here.
3. `find_plan` makes the problem from the terms of all ranks. A strategy makes its plan.

Plans are kept, so a call that repeats another one only checks, sends and computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.autograd import check_transforms
from ..base.policies import without_policies
from ..ranks.agreement import (
    admit_one_thread,
    gather_terms,
    mark_known,
    read_equal_terms,
    report_failure,
)
from ..ranks.rings import Rings
from ..sequence.layout import Layout
from ..strategies import Plan, choose
from ..strategies.extension import Extension, Tensors
from ..transport import LANES
from .autograd import Past, PlannedAttention
from .inputs import Inputs, check_inputs
from .masking import Masking, check_extension, check_lengths, resolve_layouts
from .options import Ahead, Options
from .refusal import CALL
from .terms import Terms, find_terms

Kept = TypeVar("Kept")

_MOST_PLANS = 64  # kept for some rings


def attend(
    rings: Rings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: Options,
    extend: Callable[[], tuple[Extension | None, tuple[Any, ...]]] = lambda: (None, ()),
    past: Past | None = None,
    ahead: Ahead | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D of v) and lse (B, H, S) of a call that all ranks of `rings` make.

    extend  returns the extension of the call, if any, and its tensors
    past    all keys and values, if k and v are only the last of them
    ahead   the calls of such tensors for which memory is reserved, with other numbers of tokens

    Raises on every rank if arguments are wrong on any rank.
    """
    # kernels rely on q's GPU being the current one
    on_device = torch.cuda.device_of(q) if isinstance(q, Tensor) else contextlib.nullcontext()
    with on_device, without_policies(), admit_one_thread(rings, CALL):
        checked: list[tuple[Inputs, Tensors, Terms]] = []

        def check() -> dict[str, Any]:
            extension, tensors = extend()
            keys, own = ((k, v), ()) if past is None else ((past.k, past.v), (k, v))
            inputs = check_inputs(q, *keys, sinks, options.is_packed)
            if extension:
                check_extension(extension, inputs.q, inputs.k)
                extension.check(tensors, q, keys[0])
                tensors = extension.prepare(tensors, inputs.q)
            check_transforms("burst_attn_func", *inputs.tensors, *tensors)

            def find(asked: Options) -> Terms:
                return find_terms(rings, inputs, asked, extension, tensors, own)

            terms = find(options) if ahead is None else find(options).with_ahead(ahead, find)
            checked.append((inputs, tensors, terms))
            return terms.compared

        lines = gather_terms(rings, CALL, check)
        [(inputs, tensors, terms)] = checked
        number = rings.history.calls + 1
        with report_failure(rings, f"call {number}"):
            plan = find_plan(rings, terms, lines, inputs.q.device)
            rings.history.calls = number
            if past is not None:
                inputs = inputs._replace(k=k, v=v)
            return _compute(rings, plan, number, inputs, tensors, terms.masking, past)


def find_plan(rings: Rings, terms: Terms, lines: tuple[bytes, ...], device: torch.device) -> Plan:
    """Return the plan that follows from the `lines` of all ranks. Plans are kept.

    Raises ValueError on all ranks if the terms do not agree or no strategy can compute the problem.
    """

    def make() -> Plan:
        try:
            everyone = read_equal_terms(lines, but=("tokens", "keys"))
            tokens, keys = ([theirs[x] for theirs in everyone] for x in ("tokens", "keys"))
            plan = _make_plan(rings, terms, tokens, keys)
            later = [_plan_ahead(rings, found) for found in terms.ahead()]
        except ValueError as error:  # every rank raises it, since it follows from all ranks' terms
            mark_known(error)
            raise
        if later:
            # at once, since all ranks stop whenever this memory grows
            found = [each.lane_bytes(with_backward) for each, with_backward in later]
            rings.reserve({lane: max(x[lane] for x in found) for lane in LANES}, device)
        for each, with_backward in later:
            each.reserve(rings, device, with_backward)  # also on rings of its own
        plan.reserve(rings, device, with_backward=terms.needs_gradient)
        return plan

    return find_kept_plan(rings, lines, make)


def _plan_ahead(rings: Rings, terms: Terms) -> tuple[Plan, bool]:
    """Return the plan of a call that has no tensors yet, and whether it will have a backward.
    Layouts tell how many tokens it has.
    """
    layout, kv_layout = terms.masking.layout, terms.masking.kv_layout
    kv_layout = layout if kv_layout is None else kv_layout
    assert isinstance(layout, Layout) and isinstance(kv_layout, Layout), "a name has no tokens"
    tokens, keys = ([x.length(r) for r in range(rings.size)] for x in (layout, kv_layout))
    return _make_plan(rings, terms, tokens, keys), terms.needs_gradient


def find_kept_plan(rings: Rings, lines: tuple[bytes, ...], make: Callable[[], Kept]) -> Kept:
    """Return the plan that `make` made for the lines of all ranks. The latest plans are kept."""
    plans = rings.history.plans
    plan: Kept | None = plans.pop(lines, None)
    if plan is None:
        plan = make()
        # Several threads without a group may do this at once. So the keys are copied, which is
        # atomic. The least recently used ones are the first.
        for old in list(plans)[: 1 - _MOST_PLANS]:
            plans.pop(old, None)
    plans[lines] = plan  # last in order: just used
    return plan


def _make_plan(rings: Rings, terms: Terms, tokens: list[int], keys: list[int]) -> Plan:
    """Return this rank's plan of a call in which rank r holds tokens[r] queries and keys[r] keys.

    Raises ValueError if these numbers do not fit the mask and the layout, or the strategy refuses.
    """
    masking = terms.masking
    mask = masking.mask_of(tokens, keys)
    layout, kv_layout = resolve_layouts(masking.layout, masking.kv_layout, mask, len(tokens))
    is_one = kv_layout is None and tokens == keys
    check_lengths(layout, tokens, "tokens" if is_one else "queries")
    if not is_one:
        check_lengths(kv_layout or layout, keys, "keys")
    problem, extension = terms.make_problem(mask, layout, kv_layout), masking.extension
    if extension is None:
        return choose(terms.strategy, problem).plan(problem, rings.rank)
    if kv_layout is not None and not extension.takes_two_lengths:
        raise ValueError(
            f"{extension.name} takes queries and keys of one layout, got {layout!r} and a "
            f"kv_layout, {kv_layout!r}: omit kv_layout"
        )
    return extension.plan(problem, rings.rank, terms.strategy)


def _compute(
    rings: Rings,
    plan: Plan,
    number: int,
    inputs: Inputs,
    tensors: Tensors,
    masking: Masking,
    past: Past | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse. If rows differ, all are computed as one sequence."""
    q, k, v, rows = inputs.q, inputs.k, inputs.v, masking.rows
    tensors = tensors if plan.takes_inputs else ()
    if rows:
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
        tensors = masking.extension.join_rows(tensors) if masking.extension else tensors
        past = past and replace(past, rows=rows)
    run: Callable[..., tuple[Tensor, Tensor]] = PlannedAttention.apply
    out, lse = run(q, k, v, inputs.sinks, rings, plan, number, past, *tensors)
    if rows:
        out = out.squeeze(0).unflatten(0, (rows, -1))
        lse = lse.squeeze(0).unflatten(1, (rows, -1)).transpose(0, 1)
    if inputs.value_size < inputs.head_size:
        out = out[..., : inputs.value_size].contiguous()
    return out, lse
