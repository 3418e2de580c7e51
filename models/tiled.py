"""A part of a block that has no attention, computed on some tokens at a time.

Such a part computes each token alone. So it can run over tiles of tokens, and what it keeps grows
with the tile instead of the sequence. The backward computes each tile again.

Letters: N tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_burst.base.autograd import check_first_derivative
from bmt_burst.base.compiled import not_compiled
from bmt_burst.base.dtypes import accumulator_dtype
from bmt_burst.base.policies import without_policies

from .later import Later, make_stand_in

Part = Callable[..., Tensor]


@not_compiled
def run_tiled(part: Part, parameters: Sequence[Tensor], tile: int, *inputs: Tensor) -> Tensor:
    """Compute part(*inputs), `tile` tokens at a time, and save only `inputs` for the backward.

    part        computes each token alone, from inputs (N, any) to (N, E)
    parameters  all tensors with a gradient that it uses besides its inputs. Each must affect its
                result
    inputs      (..., any). The first one has the shape and dtype of the result

    Values are those of one call, except that a matrix multiplication may add in another order for
    another number of rows. A parameter's gradient is the sum over tiles in fp32 (fp64), rounded to
    its dtype once. Each tile's own gradient has the parameter's dtype.

    Differentiable once: the backward raises RuntimeError with create_graph.
    """
    trained = tuple(p for p in parameters if p.requires_grad)
    tiles = _Tiles(part, trained, tile)
    stand_in = _Save.apply(tiles, len(inputs), *inputs, *trained)
    result: Tensor = Later.apply(stand_in, lambda: tiles.compute(inputs))
    return result


@dataclass(frozen=True)
class _Tiles:
    """A part, its parameters, and the number of tokens that it computes at a time."""

    part: Part
    parameters: tuple[Tensor, ...]
    size: int

    def split(self, count: int) -> Iterator[slice]:
        return (slice(at, min(at + self.size, count)) for at in range(0, count, self.size))

    def compute(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the part's result on all tokens."""
        out = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
        with without_policies():
            flat_out, *flat = (x.flatten(0, -2) for x in (out, *inputs))
            for rows in self.split(len(flat_out)):
                flat_out[rows] = self.part(*(x[rows] for x in flat))
        return out

    def gradients(
        self, inputs: Sequence[Tensor], wanted: Sequence[bool], dout: Tensor
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the gradients of the inputs that are wanted, and of all parameters."""
        flat_dout, *flat = (x.flatten(0, -2) for x in (dout, *inputs))
        pairs = zip(flat, wanted, strict=True)
        of_inputs = [torch.empty_like(x) if is_wanted else None for x, is_wanted in pairs]
        sums = [torch.zeros_like(p, dtype=accumulator_dtype(p.dtype)) for p in self.parameters]
        for rows in self.split(len(flat_dout)):
            found = self._differentiate([x[rows] for x in flat], wanted, flat_dout[rows])
            for whole in of_inputs:
                if whole is not None:
                    whole[rows] = next(found)
            for total, grad in zip(sums, found, strict=True):
                total += grad
        dinputs = [
            dx if dx is None else dx.view(x.shape) for dx, x in zip(of_inputs, inputs, strict=True)
        ]
        return dinputs, [x.to(p.dtype) for x, p in zip(sums, self.parameters, strict=True)]

    def _differentiate(
        self, inputs: Sequence[Tensor], wanted: Sequence[bool], dout: Tensor
    ) -> Iterator[Tensor]:
        """Compute a tile again. Yield the gradients of wanted inputs, then of parameters."""
        pairs = zip(inputs, wanted, strict=True)
        leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in pairs]
        with torch.enable_grad():
            out = self.part(*leaves)
        leaves = [x for x in leaves if x.requires_grad]
        return iter(torch.autograd.grad(out, (*leaves, *self.parameters), dout))


class _Save(torch.autograd.Function):
    """Saves the inputs of a part. The result is a stand-in for `Later`."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, count: int, *tensors: Tensor) -> Tensor:
        ctx.tiles, ctx.count = tiles, count
        ctx.save_for_backward(*tensors[:count])
        return make_stand_in(tensors[0])

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("a tiled part of a block")
        wanted = ctx.needs_input_grad[2 : 2 + ctx.count]
        of_inputs, of_parameters = ctx.tiles.gradients(ctx.saved_tensors, wanted, dout)
        return None, None, *of_inputs, *of_parameters
