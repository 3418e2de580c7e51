"""The linear layers of a block, together with the elementwise operations around them.

Autograd would save the results of norms and activations, and add gradients in passes of their own.
These functions save what matrix products made, and the backward computes the rest again, which
costs less than 2 % of the block. So a block saves a third less. Products add to the residual and
to other gradients where they are written.

They compute with the weights of plain linear layers, see `are_plain`. Weights are saved as they are
passed, so engines that gather weights may free them between forward and backward.

Letters: N tokens, in any number of dimensions, E width, F width of a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bmt_burst.base.autograd import check_first_derivative
from bmt_burst.fused import find_passes
from bmt_burst.nn import RMSNorm

from .later import Later, make_stand_in


def is_original(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a call of `module` does what `cls` does, and nothing else: it is no subclass, as
    those for fp8 or adapters, and has no other forward and no hooks. BMTrain's classes are allowed.
    """
    kind = vars(type(module)).get("distributed_from", type(module))
    forward, backward = module._forward_hooks, module._backward_hooks
    hooks = forward or backward or module._forward_pre_hooks or module._backward_pre_hooks
    return kind is cls and "forward" not in vars(module) and not hooks


def are_plain(linears: Iterable[nn.Module]) -> bool:
    """Whether these modules are original linear layers with plain weights, not quantized ones."""
    return all(
        is_original(x, nn.Linear) and not is_traceable_wrapper_subclass(x._parameters["weight"])
        for x in linears
    )


def norm_linears(x: Tensor, norm: RMSNorm, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return x itself, (N, E), and the results (N, F) of each linear layer of norm(x).

    Use the returned x where x is needed again: then its gradients add up in one pass.
    """
    weights, biases = [each.weight for each in linears], [each.bias for each in linears]
    results: tuple[Tensor, ...] = _NormLinears.apply(
        x, norm.weight, norm.eps_of(x), *weights, *biases
    )
    return results


def add_linear(x: Tensor, inputs: Tensor, linear: Any, scale: float) -> Tensor:
    """Return x + scale * linear(inputs), for x (N, F) and inputs (N, E)."""
    result: Tensor = _AddLinear.apply(x, inputs, linear.weight, linear.bias, scale)
    return result


def add_gated_linear(
    x: Tensor, inputs: Tensor, norm: RMSNorm | None, gate: Tensor, linear: Any, scale: float
) -> Tensor:
    """Return x + scale * linear(sigmoid(gate) * norm(inputs)), for x (N, F), inputs and gate
    (N, E). Without a norm inputs are as they are.
    """
    of_norm = (None, 0.0) if norm is None else (norm.weight, norm.eps_of(inputs))
    parameters = linear.weight, linear.bias
    result: Tensor = _AddGatedLinear.apply(x, inputs, gate, *of_norm, *parameters, scale)
    return result


def add_swiglu_linear(x: Tensor, gate: Tensor, up: Tensor, linear: Any, scale: float) -> Tensor:
    """Return x + scale * linear(silu(gate) * up), for x (N, F), gate and up (N, E)."""
    parameters = linear.weight, linear.bias

    def compute() -> Tensor:
        return _add_product(x, find_passes(gate).gate(gate, up), *parameters, scale)

    stand_in = _SaveSwiGLULinear.apply(x, gate, up, *parameters, scale)
    result: Tensor = Later.apply(stand_in, compute)
    return result


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, *parameters: Any
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        passes = find_passes(x)
        normed, r = passes.normalize(x, norm, eps)
        ctx.save_for_backward(x, norm, r, *weights)
        ctx.eps = eps
        return x, *(F.linear(normed, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a block")
        x, norm, r, *weights = ctx.saved_tensors
        passes = find_passes(x)
        normed, _ = passes.normalize(x, norm, ctx.eps)
        flat, dweights = normed.flatten(0, -2), []
        wanted = ctx.needs_input_grad[3:]
        dnormed = None
        for grad, weight, is_wanted in zip(grads, weights, wanted, strict=False):
            rows = grad.flatten(0, -2)
            dweights.append(rows.T @ flat if is_wanted else None)
            dnormed = rows @ weight if dnormed is None else dnormed.addmm_(rows, weight)
        del normed, flat
        assert dnormed is not None, "there are linear layers"
        dx, dnorm = passes.norm_gradients(dnormed.view_as(x), x, norm, r, dx)
        dbiases = map(_sum_rows, grads, wanted[len(weights) :])
        return dx, dnorm, None, *dweights, *dbiases


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.scale = scale
        return _add_product(x, inputs, weight, bias, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a block")
        inputs, weight = ctx.saved_tensors
        [grad] = grads
        dinputs = _scaled_product(grad, weight, ctx.scale).view_as(inputs)
        wanted, of_bias = ctx.needs_input_grad[2:4]
        dweight = _weight_gradient(grad, inputs, ctx.scale) if wanted else None
        return grad, dinputs, dweight, _sum_rows(grad, of_bias, ctx.scale), None


class _AddGatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        inputs: Tensor,
        gate: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(inputs, gate, norm, weight)
        ctx.eps, ctx.scale = eps, scale
        passes = find_passes(x)
        normed = inputs if norm is None else passes.normalize(inputs, norm, eps)[0]
        return _add_product(x, passes.gate(gate, normed, silu=False), weight, bias, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a block")
        inputs, gate, norm, weight = ctx.saved_tensors
        [grad] = grads
        passes = find_passes(grad)
        normed, r = (inputs, None) if norm is None else passes.normalize(inputs, norm, ctx.eps)
        dgated = _scaled_product(grad, weight, ctx.scale).view_as(gate)
        dgate, dinputs, gated = passes.gate_gradients(gate, normed, dgated, again=True, silu=False)
        del dgated, normed
        wanted, of_bias = ctx.needs_input_grad[5:7]
        dweight = _weight_gradient(grad, gated, ctx.scale) if wanted else None
        del gated
        dnorm = None
        if norm is not None:
            dinputs, dnorm = passes.norm_gradients(dinputs, inputs, norm, r, None)
        dbias = _sum_rows(grad, of_bias, ctx.scale)
        return grad, dinputs, dgate, dnorm, None, dweight, dbias, None


class _SaveSwiGLULinear(torch.autograd.Function):
    """Saves the inputs of `add_swiglu_linear`. The result is a stand-in for `Later`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.scale = scale
        return make_stand_in(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a block")
        gate, up, weight = ctx.saved_tensors
        [grad] = grads
        dgated = _scaled_product(grad, weight, ctx.scale).view_as(gate)
        dgate, dup, gated = find_passes(gate).gate_gradients(gate, up, dgated, again=True)
        del dgated
        wanted, of_bias = ctx.needs_input_grad[3:5]
        dweight = _weight_gradient(grad, gated, ctx.scale) if wanted else None
        return grad, dgate, dup, dweight, _sum_rows(grad, of_bias, ctx.scale), None


def _add_product(
    x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Return x + scale * (inputs weight^T + bias)."""
    rows = x if bias is None else torch.add(x, bias, alpha=scale)
    factors = rows.flatten(0, -2), inputs.flatten(0, -2), weight.T
    # no view: a block returns it, and FSDP2's hooks need tensors with memory of their own
    result: Tensor = torch.ops.aten._unsafe_view(torch.addmm(*factors, alpha=scale), x.shape)
    return result


def _scaled_product(rows: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return scale * rows weight, for rows (N, F) and a weight (F, E): two dimensions."""
    nothing = rows.new_empty(weight.shape[1])  # is not read, as beta is 0
    return torch.addmm(nothing, rows.flatten(0, -2), weight, beta=0, alpha=scale)


def _weight_gradient(grad: Tensor, inputs: Tensor, scale: float) -> Tensor:
    """Return scale * grad^T inputs."""
    return _scaled_product(grad.flatten(0, -2).T, inputs.flatten(0, -2), scale)


def _sum_rows(grad: Tensor, wanted: bool, scale: float = 1.0) -> Tensor | None:
    """Return the gradient of a bias, if it is wanted."""
    return grad.flatten(0, -2).sum(0).mul_(scale) if wanted else None
