"""Measures a block's elementwise passes and the loss on one GPU: ours, torch's, torch.compile's and
Liger-Kernel's.

    pip install liger-kernel
    torchrun --nproc-per-node 1 bench/passes.py --output bench/results/passes-mine.jsonl

Each row has the milliseconds of a forward and backward, and the peak of memory beyond the inputs.
The defaults are the shape of minicpm4-8b. Without GPUs cases are tiny.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.implementations import Unavailable
from bench.machine import Machine
from bmt_burst.fused import functions, torch_passes
from bmt_burst.loss import linear_cross_entropy_sum

_EPS = 1e-6
Pass = Callable[..., Tensor | tuple[Tensor, ...]]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, _EPS)


def torch_gate(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def torch_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch_passes.rotate(q, cos, sin), torch_passes.rotate(k, cos, sin)


def torch_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functions.rms_norm(x, weight, _EPS)


def our_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return functions.apply_rope(q, cos, sin), functions.apply_rope(k, cos, sin)


def our_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy_sum(hidden, weight, labels)[0]


class Liger:
    """Liger-Kernel's functions with the arguments of the others."""

    def __init__(self) -> None:
        try:
            self.ops = importlib.import_module("liger_kernel.ops")
        except ImportError as error:
            raise Unavailable(str(error)) from error

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        of = self.ops.LigerRMSNormFunction
        return of.apply(x, weight, _EPS, 0.0, "llama", False, None)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.ops.LigerSiLUMulFunction.apply(gate, up)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Rotate. Liger takes heads before tokens, and whole tables (1, S, D)."""
        tables = (torch.cat((x, x), -1).unsqueeze(0) for x in (cos, sin))
        of = self.ops.LigerRopeFunction
        return of.apply(q.transpose(1, 2), k.transpose(1, 2), *tables)

    def loss(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of = self.ops.LigerFusedLinearCrossEntropyFunction
        return of.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum")[0]


OURS: dict[str, Pass] = {
    "RMSNorm": our_norm,
    "SwiGLU": functions.swiglu,
    "rotary positions": our_rotate,
    "head and loss": our_loss,
}
TORCH: dict[str, Pass] = {
    "RMSNorm": torch_norm,
    "SwiGLU": torch_gate,
    "rotary positions": torch_rotate,
    "head and loss": torch_loss,
}


def implementations() -> Iterator[tuple[str, Callable[[str], Pass]]]:
    """Yield each name with a function from a case to its pass, which may raise Unavailable."""
    names = {"RMSNorm": "norm", "SwiGLU": "gate", "rotary positions": "rotate"}
    yield "ours", OURS.__getitem__
    yield "torch", TORCH.__getitem__
    yield "torch.compile", lambda case: torch.compile(TORCH[case])
    yield "Liger-Kernel", lambda case: getattr(Liger(), names.get(case, "loss"))


def make_inputs(case: str, args: argparse.Namespace, machine: Machine) -> list[Tensor]:
    """Make the inputs of a case. Floating ones need gradients, apart from rotary tables."""
    width, inner, (heads, kv_heads) = args.width, args.inner, args.heads
    made = torch.Generator(machine.device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=made, dtype=machine.dtype, device=machine.device)
        return x.requires_grad_()

    tokens, head_dim = args.tokens, args.head_dim
    if case == "RMSNorm":
        return [noise(1, tokens, width), noise(width)]
    if case == "SwiGLU":
        return [noise(1, tokens, inner), noise(1, tokens, inner)]
    if case == "head and loss":
        weight = (noise(args.vocab, width) * 0.02).detach().requires_grad_()
        labels = torch.randint(args.vocab, (tokens,), generator=made, device=machine.device)
        return [noise(tokens, width), weight, labels]
    phase = torch.arange(tokens, device=machine.device).unsqueeze(1) * torch.logspace(
        0, -4, head_dim // 2, device=machine.device
    )
    qk = [noise(1, tokens, heads, head_dim), noise(1, tokens, kv_heads, head_dim)]
    return [*qk, phase.cos(), phase.sin()]


def run(args: argparse.Namespace, machine: Machine) -> Iterator[dict]:
    """Measure each case with each implementation. Yield the rows."""
    for case in OURS:
        inputs = make_inputs(case, args, machine)
        wanted = [x for x in inputs if x.requires_grad]
        for name, find in implementations():
            machine.at = f"{case}, {name}"
            row = {"kind": "passes", "case": case, "impl": name, "tokens": args.tokens}
            row |= {"width": args.width, "inner": args.inner, "vocab_size": args.vocab}
            work = functools.partial(measure, find, inputs, wanted, row, machine)
            failure = machine.attempt(work)
            yield row | ({"unavailable": failure} if failure else {})


def measure(
    find: Callable[[str], Pass],
    inputs: list[Tensor],
    wanted: list[Tensor],
    row: dict,
    machine: Machine,
) -> None:
    """Add milliseconds and memory of a forward and backward to a row."""
    of = find(row["case"])
    out = of(*inputs)
    outs = [out] if isinstance(out, Tensor) else list(out)
    grads = [torch.ones_like(x) for x in outs]
    del out, outs

    def both() -> None:
        out = of(*inputs)
        torch.autograd.grad([out] if isinstance(out, Tensor) else out, wanted, grads)

    both()
    row["ms"] = machine.time_ms(both, machine.once_ms(both))
    row["extra_gib"] = machine.extra_gib(both, 0)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = options.make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=16384 if cuda else 16)
    add("--width", type=int, default=4096 if cuda else 64)
    add("--inner", type=int, default=16384 if cuda else 128)
    add("--vocab", type=int, default=73448 if cuda else 128)
    add("--heads", type=options.parse_heads, default=(32, 2) if cuda else (4, 2), metavar="Q:KV")
    add("--head-dim", type=int, default=128 if cuda else 16)
    args, machine = parser.parse_args(), Machine()
    if machine.size != 1:
        parser.error(f"one process measures passes, not {machine.size}")
    machine.record(run(args, machine), args.output)


if __name__ == "__main__":
    main()
