"""Softmax attention: its kind, and its calls.

1. `find_request` checks the arguments of this rank, and finds everything that ranks must agree on.
   Requests are kept: a call that repeats another one checks only what the key does not have.
2. `run_agreed` compares the terms of all ranks, or reports the error if a check failed here.
3. A strategy makes the plan, from the terms of all ranks. Plans are kept.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_count, as_int, as_positive, check_choice
from ..base.autograd import check_transforms
from ..base.dtypes import accumulator_dtype
from ..base.kept import KeptResults, is_recomputing
from ..base.policies import without_policies
from ..kernels import Kernel, pick
from ..ranks.agreement import Terms, run_agreed
from ..ranks.rings import Rings, check_device
from ..ranks.sequence_parallel import WholeSequence
from ..sequence.layout import Layout
from ..sequence.rows import Rows
from ..spec import Spec
from ..strategies import GROUP_BYTES, Plan, Problem, Sizes, choose, names
from ..strategies.extension import DenseCall, Extension, Tensors
from ..transport import LANES
from .autograd import Past, PlannedAttention
from .inputs import Form, check_inputs, describe_inputs
from .refusal import CALL
from .requests import find_plan, find_request, known_to_all, on_device

_BACKWARDS = ("auto", "q", "kv")
_RECORDING = "recording of gradients"
_OWN = ("tokens", "keys")  # terms that may differ
_KINDS = 4  # of layers whose plans of all chunks are kept, up to four calls of a chunk


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax attention: everything of a call but its sequence and its tensors, which are q, k, v,
    the sinks or None, and those of the extension.

    scale      factor of the scores, by default 1 / sqrt(D)
    window     of a layer: a token sees only itself and the window - 1 tokens before it, if the mask
               allows
    extension  what narrows the visible pairs or adds to scores

    All others are options of burst_attn_func, which documents them. Raises TypeError for a value of
    a wrong type, ValueError for one that is out of range.
    """

    scale: float | None = None
    flash: str = "auto"
    deterministic: bool = False
    strategy: str = "auto"
    backward: str = "auto"
    group_bytes: int = GROUP_BYTES
    softcap: float | None = None
    window: int | None = None
    extension: Extension | None = None
    name: ClassVar[str] = "softmax attention"

    def __post_init__(self) -> None:
        """Check the options. Numbers of numpy become Python's, since JSON takes none of numpy."""
        check_choice("backward", self.backward, _BACKWARDS)
        check_choice("strategy", self.strategy, ("auto", *names()))
        if not isinstance(self.flash, str):
            raise TypeError(f"flash must be the name of a kernel, got {self.flash!r}")
        checked: dict[str, Any] = {
            "deterministic": as_bool("deterministic", self.deterministic),
            "group_bytes": as_int("group_bytes", self.group_bytes),
        }
        # kernels assume that scaling keeps the order of scores
        for name, shown in (("scale", "softmax_scale"), ("softcap", "softcap")):
            if (value := getattr(self, name)) is not None:
                checked[name] = as_positive(shown, value)
        if not 0 <= (size := checked["group_bytes"]) < 1 << 63:
            got = size if size < 0 else f"a number of {size.bit_length()} bits"
            raise ValueError(f"group_bytes must be a number of bytes below 2^63, got {got}")
        if self.window is not None:
            checked["window"] = as_count("window", self.window)
            if self.extension is not None:
                raise ValueError(f"expected a window or {self.extension.name}, got both")
        vars(self).update(checked)

    def attend(self, part: WholeSequence, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Return the attention of a whole sequence: (B, S_local, H, D of v)."""
        return attend(part.sp.rings, part, self, q, k, v, tensors)[0]

    def check_tensors(self, tensors: Sequence[Any]) -> None:
        """Raise ValueError for more tensors than the sinks, unless an extension checks them."""
        if len(tensors) > 1 and self.extension is None:
            raise ValueError(
                f"expected no tensors besides q, k, v and sinks, got {len(tensors) - 1} more"
            )

    def make_spec(self, head_size: int, value_size: int, dtype: torch.dtype) -> Spec:
        """Return the formula for inputs of these sizes.

        Raises ValueError if kernels cannot scale and cap their scores. Kernels compute in the
        accumulator's dtype. They multiply by scale, or by scale / softcap and softcap, and some of
        them by log2(e) as well.
        """
        scale, softcap = head_size**-0.5 if self.scale is None else self.scale, self.softcap
        wide = torch.finfo(accumulator_dtype(dtype))
        most = wide.max * math.log(2)
        if not wide.tiny <= scale <= most:
            kind = "zero" if scale < wide.tiny else "infinite"
            of_scores = f"{wide.dtype}, in which {dtype} scores are scaled"
            raise ValueError(f"softmax_scale={scale} is {kind} in {of_scores}")
        if softcap is not None and not all(
            wide.tiny <= x <= most for x in (softcap, scale / softcap)
        ):
            raise ValueError(
                f"softcap={softcap}, or softmax_scale={scale} divided by it, is zero or infinite "
                f"in {wide.dtype}, in which {dtype} scores are capped"
            )
        value = value_size if value_size < head_size else None
        return Spec(scale, self.deterministic, softcap=softcap, value_size=value)


@dataclass(eq=False)
class Request:
    """A call as one rank has checked it: everything but the values of tensors.

    extension       the extension, bound to the call
    sizes           if rows were stacked as one sequence, the batch is 1
    needs_gradient  whether autograd records the call
    """

    terms: Terms
    kind: SoftmaxAttention
    form: Form
    rows: Rows
    extension: Extension | None
    spec: Spec
    kernel: Kernel
    sizes: Sizes
    device: torch.device
    needs_gradient: bool

    def make_plan(self, rings: Rings, tokens: list[int], keys: list[int]) -> Plan:
        """Return this rank's plan, if rank r holds tokens[r] queries and keys[r] keys.

        Raises ValueError on all ranks if they do not fit the mask and the layout, or the strategy
        refuses. The plan of an extension may fail on this rank alone.
        """
        with known_to_all():
            mask, layout, kv_layout = self.rows.place(tokens, keys)
            side = rings.inner.side
            problem = Problem(
                mask=mask,
                layout=layout,
                kv_layout=kv_layout,
                spec=self.spec,
                kernel=self.kernel,
                sizes=self.sizes,
                inner=rings.inner.size,
                outer=rings.outer.size,
                forward=side or "auto",
                backward=side or self.kind.backward,
                group_bytes=self.kind.group_bytes,
            )
            strategy = _find_strategy(self.kind.strategy, self.device.type)
            if self.extension is None:
                return choose(strategy, problem).plan(problem, rings.rank)
            if kv_layout is not None and not self.extension.takes_two_lengths:
                got = f"{layout!r} and a kv_layout, {kv_layout!r}: omit kv_layout"
                raise ValueError(
                    f"{self.extension.name} takes queries and keys of one layout, got {got}"
                )
        return self.extension.plan(problem, rings.rank, strategy)

    def plan(self, rings: Rings, everyone: Sequence[Mapping[str, Any]]) -> Plan:
        """Return the plan that follows from the own terms of all ranks, with memory for it."""
        tokens, keys = ([own[name] for own in everyone] for name in _OWN)
        if rings.inner.is_imagined and isinstance(self.rows.layout, Layout):
            tokens, keys = _count_tokens(self.rows)
        plan = self.make_plan(rings, tokens, keys)
        plan.reserve(rings, self.device, with_backward=self.needs_gradient)
        return plan

    def compute(
        self,
        rings: Rings,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Any],
        past: Past | None,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse. If rows differ, all are computed as one sequence."""
        form, stacked = self.form, self.rows.stacked
        if form.changes:
            [q] = form.prepare(q)
            # keys and values of a past are as they were kept
            k, v = form.prepare(k, v) if past is None else (k, v)
        sinks, *others = tensors or (None,)
        inputs: Tensors = ()
        if self.extension is not None and plan.takes_inputs:
            inputs = self.extension.prepare(tuple(others), q)
            inputs = self.extension.join_rows(inputs) if stacked else inputs
        if stacked:
            q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
            past = past and replace(past, rows=stacked)
        run: Callable[..., tuple[Tensor, Tensor]] = PlannedAttention.apply
        out, lse = run(q, k, v, sinks, rings, plan, rings.history.calls, past, *inputs)
        if stacked:
            out = out.squeeze(0).unflatten(0, (stacked, -1))
            lse = lse.squeeze(0).unflatten(1, (stacked, -1)).transpose(0, 1)
        if form.value_size < form.head_size:
            out = out[..., : form.value_size].contiguous()
        return out, lse


def attend(
    rings: Rings,
    sequence: WholeSequence,
    kind: SoftmaxAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Any] = (),
    past: Past | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D of v) and lse (B, H, S) of a call that all ranks of `rings` make.

    tensors  the sinks or None, and then those of the extension
    past     all keys and values, if k and v are only the last of them

    Raises on every rank if arguments are wrong on any rank.
    """
    keys = (k, v) if past is None else (past.k, past.v, k, v)
    given = (q, *keys, *tensors)

    def check() -> tuple[Terms, Request]:
        request = _find_request(rings, sequence, kind, given, tensors)
        return request.terms, request

    def run(request: Request, lines: tuple[bytes, ...]) -> tuple[Tensor, Tensor]:
        plan = find_plan(rings, request.terms, lines, functools.partial(request.plan, rings))
        return request.compute(rings, plan, q, k, v, tensors, past)

    with on_device(q), without_policies():
        return run_agreed(rings, CALL, check, run, counts=True)


def reserve_ahead(
    rings: Rings,
    find_sequences: Callable[[], Iterable[WholeSequence]],
    kind: SoftmaxAttention,
    given: Sequence[Any],
    terms: dict[str, Any],
    with_backward: bool,
) -> None:
    """Reserve memory for calls of such tensors, with other numbers of tokens. Keep their plans.

    find_sequences  returns the sequences of these calls, with Layouts
    given           q, k and v, the sinks or None, and the tensors of the extension
    terms           what ranks compare: equal on two ranks only if the sequences are
    with_backward   whether these calls will have a backward

    It is a call of its own, which all ranks make. Raises as `attend`.
    """
    doing, history = "the reservation of memory for later calls", rings.history
    # a second run takes results of the first one, and says so in its terms
    runs = (False, True) if with_backward and kind.extension else (False,)

    def find(sequence: WholeSequence, recomputes: bool = False) -> Request:
        with KeptResults([], recomputes):
            return _find_request(rings, sequence, kind, given, given[3:])

    def check() -> tuple[Terms, Request]:
        first = find(next(iter(find_sequences())))
        shared = {**first.terms.shared, **terms, "with backward": with_backward}
        return Terms(doing, shared), first

    def make() -> bool:
        with known_to_all():
            sequences = [*dict.fromkeys(find_sequences())]
        history.most = max(history.most, _KINDS * 4 * len(sequences))
        requests = [find(sequence) for sequence in sequences]
        tokens = [_count_tokens(request.rows) for request in requests]
        plans = [r.make_plan(rings, *each) for r, each in zip(requests, tokens, strict=True)]
        # at once, since all ranks stop whenever this memory grows
        found = [plan.lane_bytes(with_backward) for plan in plans]
        rings.reserve({lane: max(x[lane] for x in found) for lane in LANES}, given[0].device)
        for sequence, plan, each in zip(sequences, plans, tokens, strict=True):
            plan.reserve(rings, given[0].device, with_backward)  # also on rings of its own
            of_ranks = [dict(zip(_OWN, own, strict=True)) for own in zip(*each, strict=True)]
            for recorded, recomputes in itertools.product({False, with_backward}, runs):
                shared = {**find(sequence, recomputes).terms.shared, _RECORDING: recorded}
                lines = tuple(Terms(CALL, shared, own).line for own in of_ranks)
                same = functools.partial(next, iter((plan,)))
                history.find(history.plans, lines, same)
        return True

    def run(_: Request, lines: tuple[bytes, ...]) -> None:
        history.find(history.plans, lines, make)

    if rings.shared:
        with on_device(given[0]), without_policies():
            run_agreed(rings, doing, check, run)


def _count_tokens(rows: Rows) -> tuple[list[int], list[int]]:
    layout, kv_layout = rows.layout, rows.kv_layout or rows.layout
    assert isinstance(layout, Layout) and isinstance(kv_layout, Layout), "a name has no tokens"
    tokens, keys = ([x.length(r) for r in range(x.size)] for x in (layout, kv_layout))
    return tokens, keys


def _find_request(
    rings: Rings,
    sequence: WholeSequence,
    kind: SoftmaxAttention,
    given: Sequence[Any],
    tensors: Sequence[Any],
) -> Request:
    """Return the request of a call. Raises TypeError or ValueError if an argument is wrong.

    given    all tensors: q, all keys and values, the call's own ones if they are the last of a
             past, and `tensors`
    tensors  the sinks and those of the extension
    """
    check_transforms("burst_attn_func", *(x for x in given if isinstance(x, Tensor)))
    options = kind, len(tensors), kind.extension and is_recomputing()
    check = functools.partial(_check_call, rings, sequence, kind, given, tensors)
    return find_request(rings, sequence, options, given, check)


def _check_call(
    rings: Rings,
    sequence: WholeSequence,
    kind: SoftmaxAttention,
    given: Sequence[Any],
    tensors: Sequence[Any],
) -> Request:
    """Return the request of a call whose arguments are new, as `_find_request`."""
    (q, k, v), extension = given[:3], kind.extension
    sinks, *others = tensors or (None,)
    form = check_inputs(q, k, v, sinks, sequence.packed)
    if extension is not None:
        if not extension.takes_two_lengths and q.shape[-3] != k.shape[-3]:
            got = f"{q.shape[-3]} queries and {k.shape[-3]} keys"
            raise ValueError(f"{extension.name} takes queries and keys of one sequence, got {got}")
        extension.check(tuple(others), q, k)
    q, k, v = form.prepare(q, k, v)
    check_device(rings, q)
    spec = kind.make_spec(form.head_size, form.value_size, q.dtype)
    kernel = pick(kind.flash, q, k, spec)
    batch, _, heads, head_size = q.shape
    of_rows = extension.of_rows(batch) if extension else ()
    rows = sequence.find_rows(batch, rings.size, of_rows)._replace(window=kind.window)
    of_extension: dict[str, Any] = {}
    if extension is not None:
        extension = extension.join(of_rows) if rows.stacked else of_rows[0]
        inputs = extension.prepare(tuple(others), q)
        call = DenseCall(q, k, rows.mask, rows.causal, kernel, spec)
        extension = extension.bind(inputs, call)
        of_extension = extension.terms(inputs)
    recorded = any(x.requires_grad for x in given if isinstance(x, Tensor))
    needs_gradient = torch.is_grad_enabled() and recorded
    # Arguments come before the kernels that follow from them: the first difference is reported.
    shared = {
        **describe_inputs(form, q, k, sinks),
        "softmax_scale": spec.scale,
        "softcap": spec.softcap,
        **rows.terms,
        "deterministic": kind.deterministic,
        "strategy": kind.strategy,
        "backward": kind.backward,
        "group_bytes": kind.group_bytes,
        _RECORDING: needs_gradient,
        "the kernel of flash": kernel.name,
        **of_extension,
    }
    counts = (x.shape[1] * max(rows.stacked, 1) for x in (q, k))
    terms = Terms(CALL, shared, dict(zip(_OWN, counts, strict=True)))
    batch, partial = 1 if rows.stacked else batch, kernel.partial_dtype(q.dtype)
    sizes = Sizes(batch, heads, k.shape[2], head_size, q.dtype, partial)
    of_call = spec, kernel, sizes, q.device, needs_gradient
    return Request(terms, kind, form, rows, extension, *of_call)


def _find_strategy(name: str, device_type: str) -> str:
    """Return the strategy called `name`. Where "auto" always means the ring, return that."""
    # only GPUs compute short calls before the host has enqueued them
    return "ring" if name == "auto" and device_type != "cuda" else name
