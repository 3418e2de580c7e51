"""The functions that are compiled on GPUs: what is compiled is what is written, for shapes as they come."""

import pytest
import torch

from bmt_burst import loss, nn, ring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

N, V = 6, 10
CASES = {
    "apply_rope": (nn.apply_rope, [(2, 5, 3, 8), (5, 4), (5, 4)]),
    "swiglu": (nn.swiglu, [(2, 5, 8), (2, 5, 8)]),
    "_logsumexp": (loss._logsumexp, [(N, V)]),
    "_logits_gradient": (loss._logits_gradient, [(N, V), (N,), None, (N,)]),
    "surrogate_out": (ring.surrogate_out, [(2, 5, 3, 8), (2, 3, 5)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_compiled_equals_written(name, dtype):
    """With gradients; on CPUs as torch traces it, without generated code."""
    torch._dynamo.reset()
    function, shapes = CASES[name]
    traced = torch.compile(function.__wrapped__, dynamic=True, fullgraph=True, backend="aot_eager")
    compiled = function if DEVICE == "cuda" else traced
    for factor in (1, 2):  # the second time with more rows, for which nothing is compiled anew
        results = []
        for each in (compiled, function.__wrapped__):
            torch.manual_seed(factor)
            tensors = [torch.arange(N * factor) - 1 if s is None else torch.randn(grown(s, factor)) for s in shapes]
            half = {0} if name != "swiglu" else {0, 1}
            tensors = [x.to(DEVICE, dtype if i in half else x.dtype) for i, x in enumerate(tensors)]
            differentiable = name in ("apply_rope", "swiglu")
            tensors = [x.requires_grad_(differentiable and i in half) for i, x in enumerate(tensors)]
            out = each(*tensors)
            grads = torch.autograd.grad(out.sum(), [x for x in tensors if x.requires_grad]) if differentiable else ()
            results.append([out.detach(), *grads])
        for mine, expected in zip(*results, strict=True):
            assert mine.dtype == expected.dtype
            assert torch.allclose(mine.float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def grown(shape, factor):
    """With more tokens or rows."""
    return tuple(n * factor if n in (5, N) else n for n in shape)
