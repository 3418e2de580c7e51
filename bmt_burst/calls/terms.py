"""The terms of a call: everything that its ranks must agree on.

One rank alone does not know the length of the sequence that its tokens belong to. So the ranks
compare their terms in each call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.autograd import check_transforms
from ..errors import RanksDisagree
from ..kernels import Kernel, pick, pick_biased
from ..ranks.agreement import format_terms, read_terms
from ..ranks.rings import Rings, check_device
from ..sequence.layout import Layout
from ..sparse.choice import find_fault
from ..sparse.memory import is_recomputing
from ..spec import Spec
from .inputs import Given, Inputs, check_inputs, prepare_inputs
from .masking import Masking, find_masking
from .options import Options, check_options, check_scale
from .refusal import CALL

_MOST_TERMS = 64  # kept for some rings


@dataclass(frozen=True)
class Terms:
    """A call as one rank understands it: everything but the values of tensors.

    shape           (B, S, H, D), the shape of q
    head_sizes      the head sizes of q and of v, as they were passed
    autocast        the dtype that autocast cast the inputs to, if it is on
    needs_gradient  whether autograd records the call
    has_choice      whether sparse attention takes the choice of an earlier run
    bias_rows       the number of rows of the bias, if any
    options         checked options
    biased_kernel   with a bias, the kernel of the pairs outside areas of one row
    """

    shape: torch.Size
    head_sizes: tuple[int, int]
    kv_heads: int
    dtype: torch.dtype
    device_type: str
    autocast: torch.dtype | None
    needs_gradient: bool
    bias_rows: int | None
    has_sinks: bool
    has_choose_by: bool
    has_choice: bool
    options: Options
    masking: Masking
    spec: Spec
    kernel: Kernel
    biased_kernel: Kernel | None

    @functools.cached_property
    def message(self) -> bytes:
        """The line that this rank sends to the others. All terms but "tokens" must be equal.

        Arguments come before the kernels that follow from them: the first difference is reported.
        """
        batch, tokens, heads, _ = self.shape
        head_size, value_size = self.head_sizes
        options, masking = self.options, self.masking
        terms = {
            "batch": batch,
            "masks, layouts or scores by row": masking.rows > 0,
            "tokens": tokens * max(masking.rows, 1),
            "q heads": heads,
            "kv heads": self.kv_heads,
            "head size": head_size,
            "head size of v": value_size,
            "autocast": self.autocast and str(self.autocast),
            "dtype": str(self.dtype),
            "device type": self.device_type,
            "softmax_scale": self.spec.scale,
            "softcap": self.spec.softcap,
            "sinks": self.has_sinks,
            "sparse": options.sparse and str(options.sparse),
            "choose_by": self.has_choose_by,
            "kept choices": self.has_choice,
            "mask": _describe_mask(masking),
            "layout": _describe_layout(masking.layout),
            "scores": masking.scores and masking.scores.digest,
            "bias rows": self.bias_rows,
            "deterministic": options.deterministic,
            "strategy": options.strategy,
            "backward": options.backward,
            "optimize_bwd_comm": options.optimize_bwd_comm,
            "group_bytes": options.group_bytes,
            "recording of gradients": self.needs_gradient,
            "the kernel of flash": self.kernel.name,
            "the kernel of the bias": self.biased_kernel and self.biased_kernel.name,
        }
        return format_terms(CALL, terms)


def find_terms(rings: Rings, given: Given, options: Options) -> tuple[Inputs, Terms]:
    """Return the inputs of a call, checked, and its terms.

    Terms are kept by everything that they and the checks follow from. Layers repeat calls, and the
    host has little time for each.

    Raises TypeError or ValueError if a tensor or an option is wrong, RuntimeError inside transforms
    of torch.func and in forward mode.
    """
    known = rings.history.known
    key: tuple[Any, ...] | None
    terms: Terms | None
    try:
        key = (given.describe(), *_describe_options(options), is_recomputing())
        terms = known.get(key)
    except Exception:  # noqa: BLE001 - an argument is wrong: the checks below say what is wrong
        key = terms = None
    inputs = check_inputs(given) if terms is None else prepare_inputs(given)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    check_transforms("burst_attn_func", *(x for x in tensors if x is not None))
    if terms is None:
        terms = _make_terms(rings, inputs, options, given.is_packed)
        if len(known) >= _MOST_TERMS:
            known.clear()
        if key is not None:
            known[key] = terms
    return inputs, terms


def _describe_options(options: Options) -> tuple[Options, tuple[type, ...]]:
    """Return the options, with tuples in place of lists, and their types: 1 is equal to True."""
    types = tuple(map(type, options))
    if list not in types:
        return options, types
    options = Options._make(tuple(x) if isinstance(x, list) else x for x in options)
    return options, tuple(map(type, options))


def _make_terms(rings: Rings, inputs: Inputs, options: Options, is_packed: bool) -> Terms:
    q, k, rows = inputs.q, inputs.k, inputs.bias_rows
    if (rows is None) != (options.scores is None):
        got = "scores" if rows is None else "a bias"
        raise ValueError(
            f"expected scores and bias together, got {got} alone: scores say which row of the bias "
            "each pair adds, as Scores.by_distance(mask, distances) does"
        )
    options = check_options(options)
    check_device(rings, q)
    spec = _make_spec(options, inputs)
    if spec.softcap is not None and rows is not None:
        raise ValueError("expected softcap or a bias, got both: no kernel caps scores with a bias")
    kernel = pick(options.flash, q, k, spec)
    masking = find_masking(options, len(q), rings.size, is_packed)
    _check_sparse(options, masking, rows is not None, inputs.choose_by is not None)
    if rows is not None and masking.scores is not None and masking.scores.num_rows > rows:
        raise ValueError(
            f"bias must have {masking.scores.num_rows} rows, as scores need, got {rows}"
        )
    return Terms(
        shape=q.shape,
        head_sizes=(inputs.head_size, inputs.value_size),
        kv_heads=k.shape[2],
        dtype=q.dtype,
        device_type=q.device.type,
        autocast=inputs.autocast,
        needs_gradient=inputs.need_gradient,
        bias_rows=rows,
        has_sinks=inputs.sinks is not None,
        has_choose_by=inputs.choose_by is not None,
        has_choice=options.sparse is not None and is_recomputing(),
        options=options,
        masking=masking,
        spec=spec,
        kernel=kernel,
        biased_kernel=None if rows is None else pick_biased(kernel, q, k, spec),
    )


def _make_spec(options: Options, inputs: Inputs) -> Spec:
    size, value_size = inputs.head_size, inputs.value_size
    scale = size**-0.5 if options.softmax_scale is None else options.softmax_scale
    check_scale(scale, options.softcap, inputs.q.dtype)
    return Spec(
        scale,
        options.deterministic,
        softcap=options.softcap,
        value_size=value_size if value_size < size else None,
    )


def _check_sparse(options: Options, masking: Masking, has_bias: bool, has_choose_by: bool) -> None:
    """Raise ValueError if the other arguments do not fit `sparse`."""
    sparse = options.sparse
    if has_choose_by != (sparse is not None and sparse.use_nope):
        got = f"choose_by and sparse={sparse}" if has_choose_by else f"{sparse} alone"
        raise ValueError(f"expected choose_by together with use_nope=True, got {got}")
    if sparse is None:
        return
    if has_bias:
        raise ValueError("expected sparse or a bias, got both: sparse attention adds no bias")
    if masking.mask is None and not masking.causal:
        raise ValueError("expected causal=True or a mask of causal documents with sparse, got none")
    if masking.mask is not None and (fault := find_fault(masking.mask)):
        raise ValueError(fault)


def _describe_mask(masking: Masking) -> str:
    mask = masking.mask
    if mask is None:
        return "causal" if masking.causal else "full"
    return f"{mask.seq_len} tokens in {len(mask.slices)} slices, digest {mask.digest}"


def _describe_layout(layout: str | Layout) -> str:
    """Return a line that is equal for equal layouts, in every process."""
    return layout if isinstance(layout, str) else f"{layout.term} of {layout.seq_len} tokens"


def compare_terms(said: Sequence[bytes], masked_by: str = "mask") -> list[int]:
    """Return the number of tokens of each rank, the only term in which ranks may differ.

    masked_by  the arguments that the mask follows from

    Raises RanksDisagree on every rank if any other term differs between ranks.
    """
    replies = read_terms(said)
    for rank, reply in enumerate(replies):
        for term, value in replies[0].items():
            if term != "tokens" and reply[term] != value:
                name = masked_by if term == "mask" else term
                raise RanksDisagree(
                    f"ranks differ in {name}: rank 0 has {value!r}, rank {rank} has {reply[term]!r}"
                )
    return [reply["tokens"] for reply in replies]
