"""Compares results bit for bit: over runs, batch sizes, ranks and layouts.

    torchrun --nproc-per-node 2 bench/bitwise.py --output bench/results/bitwise-mine.jsonl

Rows have digests of their results. So run it twice: docs/bitwise.md then also compares processes.
On one GPU it compares runs and batch sizes only. Without GPUs cases are tiny.
"""

from __future__ import annotations

import hashlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import options
from bench.machine import Machine
from bmt_burst import InfLLMV2, Layout, Mask, alibi_slopes, burst_attn_func, kernels
from bmt_burst import lightning_attn_func as lightning
from bmt_burst.fused.functions import rms_norm
from bmt_burst.loss import linear_cross_entropy_by_row
from bmt_burst.spec import Spec
from bmt_burst.transport import ALONE
from train.engine.common import AdamW, Shard, ShardedAdamW

Results = dict[str, Tensor]
# Calls work(rank, group) on each of some ranks. Returns what each returned.
Run = Callable[[int, Callable[[int, Any], Results]], list[Results]]
FORWARD = ("out", "loss", "weights")  # results that are no gradients
SUMS = ("loss", "dweight")  # results that are sums over ranks


class Case(NamedTuple):
    """A computation on tensors (B, S, ...), of which a rank has its tokens.

    compute  takes a rank's tensors, and options of a call of attention
    choices  of `deterministic`
    batched  whether B is a batch
    """

    name: str
    compute: Callable[..., Results]
    inputs: list[Tensor]
    choices: tuple[bool, ...] = (False,)
    batched: bool = True


def cases(args: Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield all cases, with equal inputs in every process."""
    made = torch.Generator(device).manual_seed(0)
    batch, tokens, width = args.batch, args.seq_len, args.width

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=dtype, device=device)

    def heads(q: int, kv: int) -> list[Tensor]:
        return [noise(batch, tokens, count, args.head_dim) for count in (q, kv, kv, q)]

    many, few, causal = args.heads, args.kv_heads, Mask.causal(tokens)
    documents = Mask.documents((0, tokens // 3, tokens // 2 + 1, tokens))
    small = {"block_size": 4, "kernel_size": 4, "kernel_stride": 2, "window_size": 8, "topk": 3}
    sparse = InfLLMV2() if device.type == "cuda" else InfLLMV2(**small, dense_len=-1)
    for name, kv, call in (
        ("dense", many, {"mask": causal}),
        ("dense, grouped heads", few, {"mask": causal}),
        ("dense, documents", few, {"mask": documents}),
        ("sparse", few, {"mask": causal, "sparse": sparse}),
    ):
        yield Case(name, partial(_attention, burst_attn_func, call), heads(many, kv), (False, True))
    slopes = {"slopes": alibi_slopes(many).to(device)}
    yield Case("lightning", partial(_attention, lightning, slopes), heads(many, many))
    labels = torch.randint(args.vocab, (batch, tokens), generator=made, device=device)
    head, hidden = noise(args.vocab, width) * 0.02, noise(batch, tokens, width)
    yield Case("head and loss", partial(_loss, head), [hidden, labels])
    pair = [noise(batch, tokens, width) for _ in range(2)]
    yield Case("RMSNorm", partial(_norm, noise(width)), pair)
    yield Case("AdamW", _step, pair, batched=False)


def _differentiate(out: Tensor, dout: Tensor | None, **leaves: Tensor) -> Results:
    """Return the gradients of the leaves by their names."""
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return dict(zip(leaves, grads, strict=True))


def _attention(
    function: Callable[..., Tensor], fixed: dict[str, Any], inputs: list[Tensor], **call: Any
) -> Results:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    if function is lightning:
        del call["deterministic"]
    out = function(q, k, v, **fixed, **call)
    return {"out": out.detach(), **_differentiate(out, inputs[3], dq=q, dk=k, dv=v)}


def _loss(head: Tensor, inputs: list[Tensor], **_: Any) -> Results:
    hidden, weight = (x.detach().requires_grad_() for x in (inputs[0], head))
    loss, _count, by_row = linear_cross_entropy_by_row(hidden, weight, inputs[1])
    losses = torch.cat([loss.detach().view(1), by_row])
    return {"loss": losses, **_differentiate(loss, None, dhidden=hidden, dweight=weight)}


def _norm(scale: Tensor, inputs: list[Tensor], **_: Any) -> Results:
    x, weight = (y.detach().requires_grad_() for y in (inputs[0], scale))
    out = rms_norm(x, weight, 1e-6)
    return {"out": out.detach(), **_differentiate(out, inputs[1], dx=x, dweight=weight)}


def _step(inputs: list[Tensor], **_: Any) -> Results:
    """Do two steps of AdamW on a rank's shard of the weights, without clipping."""
    weights, grads = (x.float().flatten() for x in inputs)
    optimizer = ShardedAdamW({"w": Shard(weights.clone(), 0, inputs[0].shape)}, AdamW())
    for _step in range(2):
        optimizer.step({"w": grads}, 0.1, 1e9, list)
    return {"weights": optimizer.shards["w"].flat.view(inputs[0].shape)}


def compute_whole(
    case: Case, run: Run, deterministic: bool, layout: Layout, rows: int | None = None
) -> Results:
    """Return the results of the first rows of whole sequences, which ranks share by a layout."""

    def work(rank: int, group: Any) -> Results:
        shards = [layout.shard(x[:rows], rank).contiguous() for x in case.inputs]
        options = {"layout": layout, "process_group": group, "deterministic": deterministic}
        return case.compute(shards, **options)

    by_rank = run(layout.size, work)
    parts = {name: [results[name] for results in by_rank] for name in by_rank[0]}
    return {
        name: sum(x[1:], x[0]) if name in SUMS else layout.unshard(x) for name, x in parts.items()
    }


def facts(
    case: Case, deterministic: bool, size: int, run: Run, repeats: int = 4
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way in which calls on one rank and on `size` ranks may differ."""
    tokens = case.inputs[0].shape[1]
    one, zigzag = Layout.zigzag(tokens, 1), Layout.zigzag(tokens, size)
    whole = partial(compute_whole, case, run, deterministic)
    common = {"kind": "bitwise", "what": case.name, "deterministic": deterministic}
    alone = whole(one)
    again = _compare(alone, (whole(one) for _ in range(repeats)))
    yield common | {"over": "runs", **again, "digests": _digests(alone)}
    if case.batched:
        first = {name: x[:1] for name, x in alone.items() if name not in SUMS}
        yield common | {"over": "batch sizes", **_compare(first, [whole(one, rows=1)])}
    if size == 1:
        return
    shared = whole(zigzag)
    again = _compare(shared, (whole(zigzag) for _ in range(repeats)))
    yield common | {"over": "runs of ranks", **again, "digests": _digests(shared)}
    yield common | {"over": "ranks", **_compare(alone, [shared])}
    other = whole(Layout.contiguous(tokens, size))
    yield common | {"over": "layouts", **_compare(shared, [other])}


def _part(name: str) -> str:
    return "forward" if name in FORWARD else "gradients"


def _compare(first: Results, others: Iterable[Results]) -> dict[str, bool]:
    """Return by part whether the results of `first` are equal in all `others`."""
    equal: dict[str, bool] = {}
    for other in others:
        for name, x in first.items():
            equal[_part(name)] = equal.get(_part(name), True) and x.equal(other[name])
    return equal


def _digests(results: Results) -> dict[str, str]:
    """Return by part a digest of the bits of results."""
    made: dict[str, Any] = {}
    for name, x in results.items():
        content = x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        made.setdefault(_part(name), hashlib.sha256()).update(content)
    return {part: found.hexdigest()[:16] for part, found in made.items()}


def run_on(machine: Machine, size: int, work: Callable[[int, Any], Results]) -> list[Results]:
    """Run work on this rank alone, or on all ranks, whose results each rank gathers."""
    if size == 1:
        return [work(0, ALONE)]
    gathered: list[Results] = [{} for _ in range(size)]
    for name, mine in work(machine.rank, dist.group.WORLD).items():
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine.contiguous())
        for results, part in zip(gathered, parts, strict=True):
            results[name] = part
    return gathered


def measure(args: Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cases."""
    common = {name: value for name, value in vars(args).items() if name != "output"}
    common |= {"dtype": str(machine.dtype).removeprefix("torch."), "gpus": machine.size}
    common["date"] = time.strftime("%Y-%m-%d")
    for case in cases(args, machine.device, machine.dtype):
        for deterministic in case.choices:
            machine.at = f"{case.name}, deterministic={deterministic}"
            if len(case.choices) > 1:
                spec = Spec(args.head_dim**-0.5, deterministic)
                common["kernel"] = kernels.pick("auto", *case.inputs[:2], spec).name
            for row in facts(case, deterministic, machine.size, partial(run_on, machine)):
                machine.report(row["over"])
                yield row | common
        common.pop("kernel", None)


def parse_args(words: list[str] | None = None) -> Namespace:
    cuda, parser = torch.cuda.is_available(), options.make_parser(__doc__)
    for name, on_gpus, on_cpus in (
        ("--seq-len", 16384, 96),
        ("--batch", 2, 2),
        ("--heads", 32, 4),
        ("--kv-heads", 2, 2),
        ("--head-dim", 128, 16),
        ("--width", 4096, 32),
        ("--vocab", 73448, 100),
    ):
        parser.add_argument(name, type=int, default=on_gpus if cuda else on_cpus)
    args = parser.parse_args(words)
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads must divide --heads, {args.heads}, got {args.kv_heads}")
    return args


def main() -> None:
    args, machine = parse_args(), Machine()
    if args.seq_len % (2 * machine.size):
        raise SystemExit(f"--seq-len must be a multiple of {2 * machine.size}, got {args.seq_len}")
    machine.record(measure(args, machine), args.output)


if __name__ == "__main__":
    main()
