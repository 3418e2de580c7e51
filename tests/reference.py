"""Dense attention in float64, and errors relative to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bmt_burst import Mask
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.call_bias import CallBias
from bmt_burst.bias.kernels import TableKernel
from bmt_burst.kernels import Kernel, load
from bmt_burst.kernels.reference import visible
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec


def kernel_errors(
    kernel: Kernel | TableKernel,
    call: KernelCall,
    tensors: Sequence[Tensor],
    spec: Spec,
    with_delta: bool = False,
    bias: CallBias | None = None,
) -> dict[str, float]:
    """Return attention_errors of a kernel against the fp64 reference. Check dtypes and shapes.

    An error is also inf if out or a gradient is not 0 for tokens that attend to nothing or that
    nothing attends to.
    """
    *qkv, dout = tensors
    exact = [x.double() for x in tensors]
    reference = load("reference") if bias is None else bias_kernels.load("reference")
    added = () if bias is None else (bias,)
    exact_added = tuple(replace(x, table=x.table.double()) for x in added)
    expected = reference.forward(*exact[:3], call, spec, *exact_added)
    expected_grads = reference.backward(
        exact[3], *exact[:3], *expected, None, call, spec, *exact_added
    )
    out, lse = kernel.forward(*qkv, call, spec, *added)
    delta = (out.to(lse.dtype) * dout).sum(-1).transpose(1, 2) if with_delta else None
    softmax = None if with_delta else out, lse, delta
    grads = kernel.backward(dout, *qkv, *softmax, call, spec, *added)
    dtype = load(kernel.name).partial_dtype(qkv[0].dtype)
    assert all(x.dtype == dtype for x in (out, *grads[:3]))
    assert torch.promote_types(dtype, dout.dtype) == dtype
    assert lse.dtype == (torch.float64 if dout.dtype == torch.float64 else torch.float32)
    assert bias is None or grads[3].dtype == bias.table.dtype
    got, whole = [out, lse, *grads], [*expected, *expected_grads]
    assert all(mine.shape == other.shape for mine, other in zip(got, whole, strict=True))
    errors = attention_errors(got, whole, exact[3], spec.scale)
    seen = visible(call, out.device)
    sides = {
        "out": (out, seen.any(1)),
        "dq": (grads[0], seen.any(1)),
        "dk": (grads[1], seen.any(0)),
    }
    for name, (x, seeing) in (sides | {"dv": (grads[2], seen.any(0))}).items():
        if not x[:, ~seeing].eq(0).all():
            errors[name] = math.inf
    return errors


def dense_results(
    mask: Mask,
    tensors: Sequence[Tensor],
    scale: float,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
) -> list[Tensor]:
    """Return whole out and lse in fp64 of q, k and v, with an output gradient also dq, dk and dv.

    Queries that attend to nothing have an out of 0 and an lse of -inf. With dlse (B, H, S),
    gradients are those of both results. `rows` (S, S) names the row of a bias (R, H) that is added
    to each score. A bias and sinks (H,) add their gradients to the results.
    """
    q, k, v = inputs = [x.double().clone().requires_grad_() for x in tensors[:3]]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    visible_pairs = mask.dense(q.device)
    blind = ~visible_pairs.any(1, keepdim=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        inputs.append(bias.detach().double().requires_grad_())
        scores = scores + inputs[-1][rows.to(q.device)].permute(2, 0, 1)
    scores = scores.masked_fill(~visible_pairs, -torch.inf)
    if sinks is None:
        probs = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    else:
        inputs.append(sinks.detach().double().requires_grad_())
        scores = torch.cat((scores, inputs[-1].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        probs = scores.softmax(-1)[..., :-1]
    out, lse = torch.einsum("bhqk,bkhd->bqhd", probs, v), scores.logsumexp(-1)
    results, grads = [out], [x.double() for x in tensors[3:]]
    if not grads:
        return [out.detach(), lse.detach()]
    if dlse is not None:
        results.append(lse.masked_fill(lse == -torch.inf, 0.0))
        grads.append(dlse.double())
    return [out.detach(), lse.detach(), *torch.autograd.grad(results, inputs, grads)]


def relative_error(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of `expected`, or over `least` if that is
    larger.

    Where `expected` is 0 in exact arithmetic, its entries are rounding, which differs between CPUs.
    Pass the size of the terms that cancel as `least` there. By default an `expected` of zeros is
    equalled only by zeros. An error of NaN is returned as inf, because max() may drop NaN.
    """
    got, expected = got.detach().double(), expected.detach().double()
    if got.equal(expected):
        return 0.0
    error = float((got - expected).norm() / expected.norm().clamp_min(least))
    return math.inf if math.isnan(error) else error


def size_of_terms(dout: Tensor, scale: float) -> float:
    """Return the norm of scale * dout: about the size of the terms of attention's gradients, for
    normal q, k and v.

    dq and dk are sums of scale * P * (dP - delta). They cancel to 0 where a query sees one key,
    because P is 1 and dP is delta there. Pass the whole `dout`, since all queries may add to a
    shard of dk.
    """
    return scale * float(dout.double().norm())


def attention_errors(
    got: Sequence[Tensor], expected: Sequence[Tensor], dout: Tensor, scale: float
) -> dict[str, float]:
    """Return the errors of out, lse, dq, dk, dv and of the gradients of what is learned, such as a
    table or sinks, as dlearned0 and so on.

    Each error is relative to the norm of what is expected, or to size_of_terms if that is larger.
    An lse is a logarithm and may be 0, so its error is relative to at least 1 for each entry. It is
    inf if only one of the two is -inf somewhere.
    """
    learned = [f"dlearned{i}" for i in range(len(expected) - 5)]
    names, least = ["out", "lse", "dq", "dk", "dv", *learned], size_of_terms(dout, scale)
    pairs = dict(zip(names, zip(got, expected, strict=True), strict=True))
    errors = {name: relative_error(*pair, least) for name, pair in pairs.items() if name != "lse"}
    lse, exact = pairs["lse"]
    finite = exact.isfinite()
    same = lse.isfinite().equal(finite) and bool((lse[~finite] == -math.inf).all())
    errors["lse"] = (
        relative_error(lse[finite], exact[finite], math.sqrt(finite.sum())) if same else math.inf
    )
    return errors


def assert_close(
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    dout: Tensor,
    scale: float,
    bound: float,
    what: object = None,
) -> None:
    """Check that all of `attention_errors` are below `bound`."""
    errors = attention_errors(got, expected, dout, scale)
    assert max(errors.values()) < bound, (errors, what)
