"""The base of layers over ranks, and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from torch import Tensor, nn

from ..calls.refusal import refuse_wrong_arguments
from ..fused import functions
from ..ranks.sequence_parallel import SequenceParallel, check_sp

# Errors of wrong inputs. Not Exception: checkpointing stops a recomputation with one.
WRONG_INPUTS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)

Parameters = ParamSpec("Parameters")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise. (arXiv 2002.05202.)"""
    return functions.gate(gate, up)


class SequenceParallelModule(nn.Module):
    """A module over the ranks of `sp`."""

    sp: SequenceParallel

    def attach(self, sp: SequenceParallel) -> None:
        """Run this module, and all such modules inside it, over the ranks of `sp`.

        Call it before the first use of a module that was read from a pickle: a pickle has no
        groups. Raises TypeError if sp is not a SequenceParallel.
        """
        check_sp(sp)
        for part in self.modules():
            if isinstance(part, SequenceParallelModule):
                part.sp = sp


def refuse_wrong_forward(forward: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
    """Return a layer's `forward`. A call that does not fit its signature raises on all ranks."""
    return refuse_wrong_arguments(forward, lambda error, _, args, _named: args[0]._refuse(error))
