"""The terms of a call: everything that its ranks must agree on.

One rank alone does not know the length of the sequence that its tokens belong to. So the ranks
compare their terms in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..kernels import pick
from ..ranks.rings import Rings, check_device
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..spec import Spec
from ..strategies import Problem, Sizes
from ..strategies.extension import Extension, Tensors
from .inputs import Inputs
from .masking import Masking, find_masking
from .options import Ahead, Options, check_options, check_scale


class Terms(NamedTuple):
    """A call as one rank understands it: everything but the values of tensors.

    compared        what this rank sends to the others. All but "tokens" and "keys" must be equal.
    make_problem    returns the problem with a mask and layouts. If rows were stacked as one
                    sequence, its batch is 1.
    strategy        the strategy that was asked for. Where "auto" always means the ring, it is that.
    needs_gradient  whether autograd records the call
    ahead           returns the terms of the calls for which memory is reserved in this one
    """

    compared: dict[str, Any]
    masking: Masking
    make_problem: Callable[[Mask, Layout, Layout | None], Problem]
    strategy: str
    needs_gradient: bool
    ahead: Callable[[], list[Terms]] = list

    def with_ahead(self, ahead: Ahead, find: Callable[[Options], Terms]) -> Terms:
        """Return these terms with those that `find` returns for other calls. Ranks compare
        `ahead.terms` only, and find the rest if no plan is kept.
        """

        def find_all() -> list[Terms]:
            found = map(find, ahead.find_calls())
            return [terms._replace(needs_gradient=ahead.with_backward) for terms in found]

        return self._replace(compared={**self.compared, **ahead.terms}, ahead=find_all)


def find_terms(
    rings: Rings,
    inputs: Inputs,
    options: Options,
    extension: Extension | None,
    tensors: Tensors,
    own: Tensors = (),
) -> Terms:
    """Return the terms of a call with these inputs, and these tensors of its extension.

    own  the call's own k and v, if those of `inputs` also have earlier keys. Autograd records them.

    Raises TypeError or ValueError if an option is wrong or does not fit.
    """
    q, k = inputs.q, inputs.k
    options = check_options(options)
    check_device(rings, q)
    spec = _make_spec(options, inputs)
    kernel = pick(options.flash, q, k, spec)
    masking = find_masking(options, extension, len(q), rings.size)
    of_extension: dict[str, Any] = {}
    if masking.extension:
        extension = masking.extension.bind(
            tensors, q, k, mask=masking.mask, causal=masking.causal, kernel=kernel, spec=spec
        )
        masking, of_extension = replace(masking, extension=extension), extension.terms(tensors)
    recorded = any(x.requires_grad for x in (*inputs.tensors, *tensors, *own))
    needs_gradient = torch.is_grad_enabled() and recorded
    # Arguments come before the kernels that follow from them: the first difference is reported.
    terms = {
        **describe_inputs(inputs, masking.rows),
        "softmax_scale": spec.scale,
        "softcap": spec.softcap,
        masking.arguments: describe_mask(masking),
        "layout": describe_layout(masking.layout),
        "kv_layout": masking.kv_layout and describe_layout(masking.kv_layout),
        "deterministic": options.deterministic,
        "strategy": options.strategy,
        "backward": options.backward,
        "group_bytes": options.group_bytes,
        "recording of gradients": needs_gradient,
        "the kernel of flash": kernel.name,
        **of_extension,
    }
    batch, _, heads, head_size = q.shape
    sizes = Sizes(
        batch=1 if masking.rows else batch,
        heads=heads,
        kv_heads=k.shape[2],
        head_size=head_size,
        dtype=q.dtype,
        partial=kernel.partial_dtype(q.dtype),
    )

    def make_problem(mask: Mask, layout: Layout, kv_layout: Layout | None) -> Problem:
        return Problem(
            mask=mask,
            layout=layout,
            kv_layout=kv_layout,
            spec=spec,
            kernel=kernel,
            sizes=sizes,
            inner=rings.inner.size,
            outer=rings.outer.size,
            backward=options.backward,
            group_bytes=options.group_bytes,
        )

    strategy = _find_strategy(options.strategy, q.device.type)
    return Terms(terms, masking, make_problem, strategy, needs_gradient)


def _find_strategy(name: str, device_type: str) -> str:
    """Return the strategy called `name`. Where "auto" always means the ring, return that."""
    # only GPUs compute short calls before the host has enqueued them
    return "ring" if name == "auto" and device_type != "cuda" else name


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


def describe_inputs(inputs: Inputs, rows: int) -> dict[str, Any]:
    """Return the terms of the tensors. `rows` are those that were stacked as one sequence."""
    batch, tokens, heads, _ = inputs.q.shape
    return {
        "batch": batch,
        "masks or layouts by row": rows > 0,
        "tokens": tokens * max(rows, 1),
        "keys": inputs.k.shape[1] * max(rows, 1),
        "q heads": heads,
        "kv heads": inputs.k.shape[2],
        "head size": inputs.head_size,
        "head size of v": inputs.value_size,
        "autocast": inputs.autocast and str(inputs.autocast),
        "dtype": str(inputs.q.dtype),
        "device type": inputs.q.device.type,
        "sinks": inputs.sinks is not None,
    }


def describe_mask(masking: Masking) -> str:
    mask = masking.mask
    if mask is None:
        return "causal" if masking.causal else "full"
    keys = f" and {mask.kv_len} keys" * (mask.kv_len != mask.seq_len)
    return f"{mask.seq_len} tokens{keys} in {len(mask.slices)} slices, digest {mask.digest}"


def describe_layout(layout: str | Layout) -> str:
    """Return a line that is equal for equal layouts, in every process."""
    return layout if isinstance(layout, str) else f"{layout.term} of {layout.seq_len} tokens"
