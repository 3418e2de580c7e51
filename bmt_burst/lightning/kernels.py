"""Kernels of lightning attention: their contract, and the choice of one.

A kernel is a module with the functions of `reference.py`, which specifies them. A forward and a
backward have two passes each, and ranks exchange states in between. So what ranks send is a part of
what kernels compute anyway:

    forward_states   finds the state before each chunk, as if all segments began with 0. Ranks
                     exchange `last`, the states after segments, and add them up to `initial`.
    outputs          adds the decayed `initial`, and returns out
    backward_states  finds the gradient of the state after each chunk, as if all were 0 after
                     segments. Ranks exchange `last`, those of the states before segments, and add
                     them up to `dfinal`.
    gradients        adds the decayed `dfinal`, and returns dq, dk and dv. It finds the states of
                     the forward again, from k, v and `initial`.

Only `last` of the result of a first pass has a meaning outside of the kernel. A second pass uses
such a result once.

Tokens are flat: T tokens of this rank, at least 1, the rows of the batch one after the other. q, k,
v and dout are (T, H, D) in one dtype, and the last dimension is contiguous. So are results, which
are contiguous. States (N, H, D, D) are wide: fp32, or fp64 for fp64 inputs. N may be 0. They have
first the entries of k or q, then those of v or dout. Two runs return the same bits. A segment's
first chunk begins with 0, so a thousand short segments need no memory for states.

Rates (`rates.py`) say how states decay: ConstantRates by `slopes` (H,) wide, TokenRates by
`log_decay` (T, H) wide. A kernel may refuse the latter, or fills their `gradient` unless it is
None. For any slopes from 0 on and any log_decay up to 0 all numbers are finite, so no exponent is
positive, and nothing is divided by a decay.

To add a kernel, write a module with these functions, and name it in `_MODULES`.
"""

from __future__ import annotations

from torch import Tensor

from ..base.registry import Modules

_MODULES = Modules(__package__, {"triton": "triton_kernel", "reference": "reference"})
load, names = _MODULES.load, _MODULES.names


def pick(name: str, q: Tensor, tokens_choose: bool = False) -> str:
    """Return the name of the kernel that `name` asks for: itself, or for "auto" the fastest.

    tokens_choose  whether each token has a log_decay

    Raises ValueError for an unknown name, and for a kernel that cannot compute with tensors like q
    (B, S, H, D). Raises TypeError for anything but a string.
    """
    return _MODULES.pick(name, q, lambda kernel: kernel.refuses(q, tokens_choose), {})
