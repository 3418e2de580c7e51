"""A call of attention: what its ranks tell each other about it, and the plan that follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.autocast import autocast_dtype
from ..base.autograd import check_transforms
from ..kernels import Kernel, pick, pick_biased
from ..ranks.agreement import gather_terms, mark_known_errors
from ..ranks.rings import Rings, check_device
from ..scores import Scores
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec
from ..strategies import Plan, Problem, Sizes, choose
from .checks import (
    cast_inputs,
    check_bias,
    check_options,
    check_packed,
    check_scale,
    check_sinks,
    check_softcap,
    check_tensors,
)
from .masking import check_lengths, expand_rows, place_layout, stack_rows, stack_scores
from .refusal import CALL
from .terms import compare_terms

_MOST_PLANS = 64  # of some rings; then the one that was not used for longest goes

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LearnedTensors:
    """What a call learns beside its inputs: the table of a bias (R, H), and sinks (H,)."""

    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def requires_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in (self.bias, self.sinks))

    @property
    def bias_rows(self) -> int:
        return 0 if self.bias is None else len(self.bias)

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None


def agree_on_call(
    rings: Rings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learned: LearnedTensors,
    options: Callable[[], dict[str, Any]],
    packed: bool,
) -> AgreedCall:
    """Check the arguments of this rank and tell the others. Raises what is wrong with them once all
    ranks know.

    A rank cannot know alone what a call means: the same number of tokens here may be part of
    sequences of several lengths. So the ranks ask each other every time, and remember the plan that
    follows from the same replies.
    """
    call: _Call | None = None
    tensors = q, k, v

    def mine() -> dict[str, Any]:
        nonlocal call, tensors
        given = options()
        tensors = cast_inputs(q, k, v)
        tensors = check_packed(*tensors) if packed else tensors
        check_tensors(*tensors)
        check_bias(learned.bias, given["scores"], tensors[0])
        check_sinks(learned.sinks, tensors[0])
        check_transforms(
            "burst_attn_func",
            *tensors,
            *(x for x in (learned.bias, learned.sinks) if x is not None),
        )
        call = _known_call(rings, tensors, learned, given)
        return call.terms

    said = gather_terms(rings, CALL, mine)
    return AgreedCall(rings, call, said, tensors, number=rings.history.calls + 1)


@dataclass(frozen=True)
class AgreedCall:
    """A call whose arguments are right on this rank, and what all ranks said of theirs.

    tensors  q, k and v as (B, S, heads, D)
    number   how many calls of these ranks there are, with this one
    """

    rings: Rings
    call: _Call
    said: tuple[bytes, ...]
    tensors: Tensors
    number: int

    @property
    def rows(self) -> int:
        """The batch size if its rows have masks or layouts of their own, else 0."""
        return self.call.rows

    def plan(self) -> Plan:
        """Return the plan that follows; then the call counts. Raises ValueError on all ranks if
        they do not agree.
        """
        plans = self.rings.history.plans
        plan = plans.pop(self.said, None)
        if plan is None:
            with mark_known_errors():
                problem = self.call.problem(self.said)
                strategy = choose(self.call.options["strategy"], problem)
            plan = strategy.plan(problem, self.rings.rank)
            plan.reserve(self.rings, self.tensors[0].device, with_backward=self.call.needs_gradient)
            _make_room(plans)
        plans[self.said] = plan  # last in order: just used
        self.rings.history.calls = self.number
        return plan


def _make_room(plans: dict[tuple[bytes, ...], Plan]) -> None:
    """Drop the first plans if there are many. Threads without a group do so at once, so keys are
    copied, atomically.
    """
    for said in list(plans)[: max(len(plans) - _MOST_PLANS + 1, 0)]:
        plans.pop(said, None)


def _known_call(
    rings: Rings, tensors: Tensors, learned: LearnedTensors, options: dict[str, Any]
) -> _Call:
    """The call with these arguments, checked: layers repeat them, and the host has little time for
    each.
    """
    q, k, _ = tensors
    values = [tuple(x) if isinstance(x, list) else x for x in options.values()]
    differentiable = any(x.requires_grad for x in (*tensors, learned))
    needs_gradient = torch.is_grad_enabled() and differentiable
    facts = (
        q.shape,
        k.shape,
        q.dtype,
        q.device,
        autocast_dtype(q),
        needs_gradient,
        learned.bias_rows,
        learned.has_sinks,
    )
    key = (*facts, *values, *map(type, values))  # 1 is equal to True
    known = rings.history.known
    try:
        call = known.get(key)
    # something that cannot be hashed, of which an error will say that it is wrong
    except TypeError:
        return _Call(rings, tensors, learned, options, needs_gradient)
    if call is None:
        call = _Call(rings, tensors, learned, options, needs_gradient)
        if len(known) >= _MOST_PLANS:
            known.clear()
        known[key] = call
    return call


class _Call:
    """A rank's arguments but for the values of tensors. Raises ValueError or TypeError if they are
    wrong.
    """

    def __init__(
        self,
        rings: Rings,
        tensors: Tensors,
        learned: LearnedTensors,
        options: dict[str, Any],
        needs_gradient: bool,
    ):
        q, k, _ = tensors
        bias_rows = learned.bias_rows
        self.bias_rows, self.has_sinks = bias_rows, learned.has_sinks
        self.inner, self.outer, self.shape, self.kv_heads = (
            rings.inner.size,
            rings.outer.size,
            q.shape,
            k.shape[2],
        )
        self.dtype, self.autocast = q.dtype, autocast_dtype(q)
        self.device_type, self.needs_gradient = q.device.type, needs_gradient
        self.options = check_options(options)
        check_scale(self.options["softmax_scale"], q.dtype)
        check_device(rings, q)
        scale, softcap = self.options["softmax_scale"], self.options["softcap"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        check_softcap(softcap, scale, q.dtype)
        if softcap is not None and bias_rows:
            raise ValueError(
                "softcap does not go with scores and a bias: no kernel caps scores that have one"
            )
        self.spec = Spec(scale, self.options["deterministic"], softcap=softcap)
        self.kernel: Kernel = pick(self.options["flash"], q, k, self.spec)
        self.biased_kernel = pick_biased(self.kernel, q, k, self.spec) if bias_rows else None
        self.mask, self.layout, self.scores, self.rows = self._masking()
        if self.scores and self.scores.num_rows > bias_rows:
            raise ValueError(f"bias has {bias_rows} rows, the scores take {self.scores.num_rows}")
        self.terms = self._terms()

    def _masking(self) -> tuple[Mask | None, str | Layout, Scores | None, int]:
        """The mask, None if `causal` says it, the layout, the scores, and the batch size if rows
        have their own.
        """
        mask, layout, size = self.options["mask"], self.options["layout"], self.inner * self.outer
        causal, batch = self.options["causal"], self.shape[0]
        masks, layouts = (
            expand_rows("mask", mask, Mask, batch),
            expand_rows("layout", layout, (str, Layout), batch),
        )
        scores = expand_rows("scores", self.options["scores"], Scores, batch)
        if mask is not None and causal:
            raise ValueError(
                "mask and causal exclude each other: give Mask.documents(..., causal=True) or the like"
            )
        if None not in scores:
            if causal or mask is not None:
                raise ValueError(
                    "scores say what is visible: neither mask nor causal goes with them"
                )
            masks = tuple(row.mask for row in scores)
        for x in layouts:
            if isinstance(x, Layout) and x.size != size:
                raise ValueError(f"the layout is one for {x.size} ranks, the group has {size}")
        if len(set(masks)) == len(set(layouts)) == len(set(scores)) == 1:
            return masks[0], layouts[0], scores[0], 0
        if None in masks:
            if not all(isinstance(x, Layout) for x in layouts):
                raise ValueError(
                    "rows with layouts of their own need a mask each, or Layouts which know their length"
                )
            masks = tuple((Mask.causal if causal else Mask.full)(x.seq_len) for x in layouts)
        return (
            *stack_rows(masks, layouts, size),
            None if None in scores else stack_scores(scores),
            batch,
        )

    def _terms(self) -> dict[str, Any]:
        """What the call means; all but "tokens" must be equal on all ranks."""
        (batch, tokens, heads, head_size), options = self.shape, self.options
        mask = (
            ("causal" if options["causal"] else "full")
            if self.mask is None
            else _described(self.mask)
        )
        layout = self.layout
        if isinstance(layout, Layout):
            layout = f"{layout.term} of {layout.seq_len} tokens"
        return {
            "batch": 1 if self.rows else batch,
            "rows of their own": self.rows,
            "tokens": tokens * max(self.rows, 1),
            "q heads": heads,
            "kv heads": self.kv_heads,
            "head size": head_size,
            "autocast": self.autocast and str(self.autocast),
            "dtype": str(self.dtype),
            "device type": self.device_type,
            "kernel": self.kernel.name,
            "need of a gradient": self.needs_gradient,
            "softmax_scale": self.spec.scale,
            "softcap": self.spec.softcap,
            "sinks": self.has_sinks,
            "mask": mask,
            "layout": layout,
            "scores": self.scores and self.scores.digest,
            "rows of the bias": self.bias_rows,
            "kernel of the bias": self.biased_kernel and self.biased_kernel.name,
            **{
                name: options[name]
                for name in ("deterministic", "strategy", "backward", "optimize_bwd_comm")
            },
            "group_bytes": options["group_bytes"],
        }

    def problem(self, said: Sequence[bytes]) -> Problem:
        """What follows from the terms of all ranks. Raises ValueError, alike on every rank."""
        tokens, options = compare_terms(said), self.options
        mask = self.mask or (Mask.causal if options["causal"] else Mask.full)(sum(tokens))
        if mask.seq_len != sum(tokens):
            raise ValueError(
                f"the mask has {mask.seq_len} tokens, the ranks hold {sum(tokens)}: {tokens}"
            )
        layout = place_layout(self.layout, mask, len(tokens))
        check_lengths(layout, tokens)
        batch, _, heads, head_size = self.shape
        partial = self.kernel.partial_dtype(self.dtype)
        sizes = Sizes(
            1 if self.rows else batch, heads, self.kv_heads, head_size, self.dtype, partial
        )
        return Problem(
            mask=mask,
            layout=layout,
            spec=self.spec,
            kernel=self.kernel,
            sizes=sizes,
            inner=self.inner,
            outer=self.outer,
            backward=options["backward"],
            send_out=not options["optimize_bwd_comm"],
            group_bytes=options["group_bytes"],
            scores=self.scores,
            biased_kernel=self.biased_kernel,
        )


def _described(mask: Mask) -> str:
    return f"{mask.seq_len} tokens in {len(mask.slices)} slices, digest {mask.digest}"
