"""What several tests share: dense attention, ways to lay out simulated ranks, real ranks as
processes.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection, util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bmt_burst import Layout, Mask, Slice, burst_attn_func, simulate
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.call_bias import CallBias, Segments
from bmt_burst.bias.kernels import TableKernel
from bmt_burst.bias.scoring import TableScoring
from bmt_burst.kernels import Kernel, load, names
from bmt_burst.kernels.reference import visible
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from bmt_burst.strategies import Problem, Sizes
from bmt_burst.transport.simulator import SimulatedRing
from bmt_burst.transport.sockets import SocketMessenger

ROOT = Path(__file__).resolve().parents[1]


GPUS = torch.cuda.device_count()
_PRELOADED = ["tests.preload"]
# Ranks that NCCL can make here: it wants a GPU for each, but for recent versions with this set.
RANKS = max(GPUS, 4) if GPUS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else GPUS


def cpu_kernels(spec: Spec) -> list[str]:
    """Return the names of the kernels that attend to fp64 tensors on CPUs with such scores."""
    q = torch.empty(1, 4, 2, 8, dtype=torch.float64)
    return [name for name in names() if load(name).refuses(spec, q, q) is None]


CPU_KERNELS = cpu_kernels(Spec(0.3))


def needs_ranks(count: int):
    """A mark that skips a test where NCCL cannot make so many."""
    return pytest.mark.skipif(
        count > RANKS, reason=f"needs NVIDIA GPUs, {count} or more; this machine has {GPUS}"
    )


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention written out over a whole sequence: out (B, S, H, D) and lse (B, H, S)."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def random_qkv(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype=torch.float64,
    seed: int = 0,
):
    """q, k, v and an output gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, h, head_size) for h in (heads, kv_heads, kv_heads, heads)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


def named_calls(unit: int) -> dict[str, KernelCall]:
    """Kernel calls of every kind; tiles have some `unit` tokens, 4 or more."""
    square, n = (0, 8 * unit), 8 * unit
    cuts = [0, 1, 2 * unit + 1, 2 * unit + 3, 5 * unit, n]
    documents = tuple((span, span) for span in itertools.pairwise(cuts))
    wide = ((0, unit), (0, 3 * unit)), ((unit, 4 * unit), (3 * unit, 7 * unit))
    tall = ((0, 4 * unit), (0, unit)), ((4 * unit, 7 * unit + 1), (unit, 4 * unit))
    apart = ((unit, 2 * unit), (2 * unit, 3 * unit)), ((2 * unit, 5 * unit), (4 * unit, 7 * unit))
    count = min(12 * unit, 300)
    # and a query between two
    many = tuple(((3 * i, 3 * i + 2), (2 * i, 2 * i + 2)) for i in range(count))
    return {
        "full": KernelCall.whole(n),
        "causal": KernelCall.whole(n, causal=True),
        "full, fewer keys": KernelCall.whole(n, 3 * unit + 1),
        "causal, more keys": KernelCall.whole(3 * unit, n, causal=True),
        "causal, fewer keys": KernelCall.whole(n, 3 * unit, causal=True),
        "documents": KernelCall(n, n, documents, right=0),
        "full documents": KernelCall(n, n, documents),
        "a window": KernelCall(n, n, ((square, square),), unit, 0),
        "a window of documents": KernelCall(n, n, documents, unit, 0),
        "a window wider than documents": KernelCall(n, n, documents, n, 0),
        "a window to both sides": KernelCall(n, n, documents, 2 * unit, unit // 2),
        "only some ahead": KernelCall(n, n, documents, None, unit),
        "only some behind": KernelCall(n, n, documents, unit, None),
        "itself and what is ahead": KernelCall(n, n, ((square, square),), 0, None),
        "itself": KernelCall(n, n, documents, 0, 0),
        "causal tiles of more keys": KernelCall(5 * unit, n, wide, right=0),
        "causal tiles of fewer keys": KernelCall(n, 5 * unit, tall, right=0),
        "a window of fewer keys": KernelCall(n, 5 * unit, tall, unit // 2, 1),
        "behind, of fewer keys": KernelCall(n, 5 * unit, tall, unit // 2, None),
        "far ahead, of fewer keys": KernelCall(n, 5 * unit, tall, n, 3 * unit),
        "tiles apart": KernelCall(6 * unit, n, apart, right=0),
        "full tiles apart": KernelCall(6 * unit, n, apart),
        "few of the tokens": KernelCall(
            n, n, (((3 * unit, 4 * unit), (5 * unit, 7 * unit)),), 2, 2
        ),
        "single tokens": KernelCall(
            unit, unit, tuple(((i, i + 1), (i, i + 1)) for i in range(unit)), right=0
        ),
        "many tiles": KernelCall(3 * count, 2 * count, many, right=0),
        "many full tiles": KernelCall(3 * count, 2 * count, many),
    }


def random_call(chance: random.Random, most: int = 20) -> KernelCall:
    """Some tiles of up to `most` tokens a side, with or without gaps, of any band."""
    tiles, q, kv = [], 0, 0
    for _ in range(chance.randint(1, 6)):
        q, kv = (at + chance.choice((0, 0, chance.randint(1, 5))) for at in (q, kv))
        queries = chance.randint(1, most)
        keys = chance.choice((queries, chance.randint(1, most)))
        tiles.append(((q, q + queries), (kv, kv + keys)))
        q, kv = q + queries, kv + keys
    left, right = (chance.choice((None, 0, 1, chance.randint(0, most + 5))) for _ in range(2))
    return KernelCall(
        q + chance.choice((0, 3)), kv + chance.choice((0, 3)), tuple(tiles), left, right
    )


def call_tensors(
    call: KernelCall,
    batch: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype=torch.float64,
    seed=0,
):
    """q, k, v and an output gradient for a kernel call."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (call.q_tokens, heads),
        (call.kv_tokens, kv_heads),
        (call.kv_tokens, kv_heads),
        (call.q_tokens, heads),
    )
    shapes = [(batch, *size, head_size) for size in sizes]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


def random_bias(
    call: KernelCall, heads: int, seed: int = 0, dtype=torch.float64, reach: int = 9
) -> CallBias:
    """A bias of 12 rows; queries and keys are some tokens each of one sequence of groups of
    segments, in order.
    """
    chance, tokens, rows = random.Random(seed), 2 * max(call.q_tokens, call.kv_tokens), 12
    fields, pairs, group = [], [], 0
    while len(fields) < tokens:
        segments, offset = chance.randint(1, 4), len(pairs)
        for i in range(segments):
            pairs += [-1 if i == j else chance.randint(-1, rows - 1) for j in range(segments)]
            fields += [(group, offset + i * segments, i)] * chance.randint(1, tokens // 3 + 1)
        group += 1
    q, kv = (_some_tokens(chance, count, tokens) for count in (call.q_tokens, call.kv_tokens))
    generator = torch.Generator().manual_seed(seed)
    segments = Segments(
        **{
            f"q_{name}": torch.tensor([fields[t][i] for t in q], dtype=torch.int32)
            for name, i in _Q_FIELDS.items()
        },
        **{
            f"kv_{name}": torch.tensor([fields[t][i] for t in kv], dtype=torch.int32)
            for name, i in _KV_FIELDS.items()
        },
        pairs=torch.tensor(pairs, dtype=torch.int32),
        other=chance.randrange(rows),
    )
    return CallBias(
        table=torch.randn(rows, heads, dtype=torch.float64, generator=generator).to(dtype),
        q_position=torch.tensor(q, dtype=torch.int32),
        kv_position=torch.tensor(kv, dtype=torch.int32),
        distances=torch.randint(rows, (2 * reach + 1,), dtype=torch.int32, generator=generator),
        segments=segments,
    )


def moved(bias: CallBias, device: str) -> CallBias:
    """The bias on a device."""
    segments = bias.segments and replace(bias.segments, **_on(bias.segments, device))
    return replace(bias, **_on(bias, device), segments=segments, prepared={})


def _on(fields: object, device: str) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in vars(fields).items() if isinstance(x, Tensor)}


_Q_FIELDS, _KV_FIELDS = {"group": 0, "base": 1}, {"group": 0, "segment": 2}


def _some_tokens(chance: random.Random, count: int, tokens: int) -> list[int]:
    """So many of 2 count or more tokens, rising, as a rank of a contiguous, zigzag or striped
    layout has, or any.
    """
    first, half = chance.randint(0, tokens - 2 * count), count // 2
    return chance.choice(
        (
            list(range(first, first + count)),
            [*range(half), *range(tokens - count + half, tokens)],
            list(range(first, first + 2 * count, 2)),
            sorted(chance.sample(range(tokens), count)),
        )
    )


def kernel_errors(
    kernel: Kernel | TableKernel,
    call: KernelCall,
    tensors: Sequence[Tensor],
    spec: Spec,
    with_delta: bool = False,
    bias: CallBias | None = None,
) -> dict[str, float]:
    """Return attention_errors of a kernel against the reference in fp64; with a bias, that of
    dtable too.

    An error is also inf if out or a gradient is not 0 for tokens that see nothing or are seen by
    nothing.
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
    assert bias is None or grads[3].dtype == bias.table.dtype
    got, whole = [out, lse, *grads], [*expected, *expected_grads]
    assert all(mine.shape == other.shape for mine, other in zip(got, whole, strict=True))
    errors = attention_errors(
        got, whole, exact[3], spec.scale, ["table"] if bias is not None else []
    )
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


def random_mask(chance: random.Random, tokens: int) -> Mask:
    """Of any kind: causal, full, windows, documents, both, arbitrary slices."""
    cuts = sorted({0, tokens, *(chance.randint(1, tokens) for _ in range(chance.randint(0, 6)))})
    window = chance.randint(1, tokens)
    makers = (
        lambda: Mask.causal(tokens),
        lambda: Mask.full(tokens),
        lambda: Mask.window(tokens, window),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7),
        lambda: Mask.documents(cuts, causal=chance.random() < 0.7, window=window),
        lambda: Mask(tokens, tuple(random_slices(chance, tokens))),
    )
    return chance.choice(makers)()


def random_slices(chance: random.Random, tokens: int):
    """Cells of a grid, each with a band of its own; some of two bands that touch."""
    grid = [sorted({0, tokens, *(chance.randint(0, tokens) for _ in range(3))}) for _ in range(2)]
    for q, kv in itertools.product(*map(itertools.pairwise, grid)):
        low, high = (chance.choice((None, chance.randint(-tokens, tokens))) for _ in range(2))
        if chance.random() < 0.6:
            yield Slice(q, kv, low, high)
            if high is not None and (low is None or low <= high) and chance.random() < 0.3:
                yield Slice(q, kv, high, high + 3)


def random_layout(chance: random.Random, mask: Mask, size: int) -> Layout:
    named = [
        layout(mask.seq_len, size) for layout in (Layout.zigzag, Layout.striped, Layout.contiguous)
    ]
    return chance.choice([*named, Layout.balanced(mask, size)])


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
    """Whole out, lse, dq, dk, dv in fp64 of q, k, v and an output gradient; 0 and -inf of queries
    that see nothing. With dlse (B, H, S), gradients are those of both results.

    With a bias (R, H), of which `rows` (S, S) says what is added to the scores, also its gradient,
    and with sinks (H,) theirs.
    """
    *inputs, dout = tensors
    q, k, v = inputs = [x.double().clone().requires_grad_() for x in inputs]
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
    results, grads = [out], [dout.double()]
    if dlse is not None:
        results.append(lse.masked_fill(lse == -torch.inf, 0.0))
        grads.append(dlse.double())
    return [out.detach(), lse.detach(), *torch.autograd.grad(results, inputs, grads)]


def ring_results(
    whole: Layout,
    tensors: Sequence[Tensor],
    scale: float,
    inner: int | None = None,
    strided: bool = False,
    dlse: Tensor | None = None,
    **options,
) -> list[Tensor]:
    """All of out, lse, dq, dk, dv, and of a bias and of sinks the gradient, of a simulated ring in
    a layout.

    Of a double one with `inner` ranks a host. With dlse (B, H, S), gradients are those of both
    results.
    """
    learned = {
        name: options.pop(name) for name in ("bias", "sinks") if options.get(name) is not None
    }

    def work(ring):
        q, k, v, dout = (whole.shard(x, ring.rank) for x in tensors)
        if strided:
            q, k, v, dout = (
                x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)
            )
        for x in (q, k, v):
            x.requires_grad_()
        mine = {name: x.detach().requires_grad_() for name, x in learned.items()}
        arguments = {"layout": whole, **mine, **options, **ring_arguments(ring, inner or ring.size)}
        out, lse = burst_attn_func(q, k, v, scale, return_lse=True, **arguments)
        results, given = [out], [dout]
        if dlse is not None:
            results.append(lse)
            given.append(whole.shard(dlse, ring.rank, dim=2))
        grads = torch.autograd.grad(results, (q, k, v, *mine.values()), given)
        return out.detach(), lse.detach(), *grads

    results = simulate(whole.size, work)
    joined = [whole.unshard([r[i] for r in results], 2 if i == 1 else 1) for i in range(5)]
    return [*joined, *(sum(shares) for shares in zip(*(r[5:] for r in results), strict=True))]


def problem(mask: Mask, layout: Layout, inner: int | None = None, **changes) -> Problem:
    """A call of attention over the layout's ranks, `inner` of them a host; fields of Problem or of
    Sizes may change, and `scores` stand for a scoring.
    """
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
        "partial": torch.float32,
    }
    sizes = Sizes(**{name: changes.pop(name, default) for name, default in sizes.items()})
    if scores := changes.pop("scores", None):
        changes["scoring"] = TableScoring(scores, bias_kernels.load("reference"))
    inner = inner or layout.size
    ranks = {"inner": inner, "outer": layout.size // inner}
    return Problem(
        mask=mask,
        layout=layout,
        spec=Spec(0.3),
        kernel=load("cpu"),
        sizes=sizes,
        **ranks,
        **changes,
    )


def ring_arguments(ring: SimulatedRing, inner: int) -> dict:
    """burst_attn_func's group arguments: a single ring, or a double ring of hosts with `inner`
    ranks.
    """
    if inner == ring.size:
        return {"process_group": ring}
    host, place = divmod(ring.rank, inner)
    intra = ring.subring(range(host * inner, (host + 1) * inner))
    return {"double_group": (intra, ring.subring(range(place, ring.size, inner)))}


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
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    dout: Tensor,
    scale: float,
    learned: Sequence[str] = (),
) -> dict[str, float]:
    """Return the errors of out, lse, dq, dk, dv and of the gradients of what is `learned`, such as
    "table" or "sinks".

    Each error is relative to the norm of what is expected, or to size_of_terms if that is larger.
    An lse is a logarithm and may be 0, so its error is relative to at least 1 for each entry. It is
    inf if only one of the two is -inf somewhere.
    """
    names, least = (
        ["out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in learned)],
        size_of_terms(dout, scale),
    )
    pairs = dict(zip(names, zip(got, expected, strict=True), strict=True))
    errors = {name: relative_error(*pair, least) for name, pair in pairs.items() if name != "lse"}
    lse, exact = pairs["lse"]
    finite = exact.isfinite()
    same = lse.isfinite().equal(finite) and bool((lse[~finite] == -math.inf).all())
    errors["lse"] = (
        relative_error(lse[finite], exact[finite], math.sqrt(finite.sum())) if same else math.inf
    )
    return errors


def wait_for_lost_rank(messenger: SocketMessenger) -> str:
    """Return what `find_lost_rank` finds, at last. The end of a connection may arrive later than
    the messages before it.
    """
    deadline = time.monotonic() + 30
    while not (lost := messenger.find_lost_rank()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return lost


def run_ranks(size: int, work: Callable, *args, backend: str = "gloo") -> list:
    """Runs `work(rank, *args)` in `size` joined processes; returns the results, or raises the first
    failure.

    `work` must be a module's function. With backend "nccl" each process has a GPU, or they share
    those there are.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        arguments = size, folder, backend, work, args
        mp.start_processes(
            _rank_main, arguments, size, start_method="spawn" if GPUS else "forkserver"
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def torchrun(size: int, *command, python: Sequence[str] = (), timeout: float = 600, **options):
    """A script and its arguments on `size` ranks under torchrun; `python` are flags of the
    interpreter.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        "--no-python",
    ]
    place = []
    # a rank is to find as many ranks on its host as there are GPUs, and take one that is there
    if 0 < GPUS < size:
        place = [
            "bash",
            "-c",
            f'LOCAL_RANK=$((LOCAL_RANK % {GPUS})) LOCAL_WORLD_SIZE={GPUS} exec "$@"',
            "rank",
        ]
    line = [sys.executable, *launcher, *place, sys.executable, *python, *map(str, command)]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options
    )


def run_script(
    size: int | None,
    script: Path | str,
    *arguments,
    timeout: float = 600,
    environments: Sequence[dict[str, str]] = (),
) -> tuple[int, str]:
    """Run a script on CPUs as `torchrun` does, with ranks that are forked from a process which has
    imported torch once.

    Without a size it is one process that is told of no ranks, as `python script` is. Ranks may have
    environments of their own. Returns the exit code of the rank that failed first, or 0, and what
    all ranks said to both of their streams. If a rank failed, the last line says how each ended.

    Ranks that wait for a failed one are killed after GRACE seconds, in which they may fail too.
    """
    context = forkserver()
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as said:
        line = [str(ROOT / script), *map(str, arguments)]
        # In this process, so that no other one can take its port.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places = [_places(rank, size, store.port) for rank in range(size)] if size else [{}]
        places = [
            there | more
            for there, more in itertools.zip_longest(places, environments, fillvalue={})
        ]
        ranks = [
            context.Process(target=_script_main, args=(line, said.name, there)) for there in places
        ]
        for rank in ranks:
            rank.start()
        failed = _join_all(ranks, timeout)
        if failed is None:
            return 0, said.read()
        endings = ", ".join(f"rank {i} with {rank.exitcode}" for i, rank in enumerate(ranks))
        return failed.exitcode, f"{said.read()}\nrun_script: ended {endings}\n"


GRACE = 60.0


def _join_all(ranks: Sequence[mp.Process], timeout: float) -> mp.Process | None:
    """Wait for all ranks and return the one that failed first, or None.

    Kills those that still run after `timeout` seconds, or GRACE seconds after the first failure.
    """
    running, failed, end = list(ranks), None, time.monotonic() + timeout
    while running and (left := end - time.monotonic()) > 0:
        connection.wait([rank.sentinel for rank in running], left)
        for rank in [rank for rank in running if rank.exitcode is not None]:
            running.remove(rank)
            if rank.exitcode and failed is None:
                failed, end = rank, min(end, time.monotonic() + GRACE)
    for rank in running:
        rank.kill()
        rank.join()
    return failed or next((rank for rank in running if rank.exitcode), None)


def fork_the_forkserver() -> None:
    """Start the forkserver as a fork of this process, which has imported what ranks need.

    A forkserver is a new process otherwise, which takes seconds to import the same again.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    importlib.import_module(*_PRELOADED)
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(_path: object, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
    """Fork a process that has only the files that are passed, and run `python -c`'s argument."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Files of this process, such as those of its loggers, then write nowhere. If they were only
        # closed, they would write to whatever is opened next.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor not in {0, 1, 2, nowhere, *passed}:
                os.dup2(nowhere, descriptor, inheritable=False)
        faulthandler.disable()
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1) for descriptor in (1, 2))
        exec(os.fsdecode(args[-1]), {})
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(0)


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return a context for processes that are forked from one which has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _places(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
        # As under torchrun, rank 0 uses the store on this port and makes none.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()}


def _script_main(line: list[str], said: str, places: dict[str, str]) -> None:
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(places)
    run_as_main(line)


def run_as_main(line: list[str]) -> None:
    """Run a script with its arguments in this process, as Python does."""
    # tensors are tiny: several would wait for each other where other processes run too
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = line
    sys.path.insert(0, str(Path(line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")


def _rank_main(
    rank: int, size: int, folder: str, backend: str, work: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % GPUS)
    store = dist.FileStore(f"{folder}/store", size)
    # Else a rank whose work is short closes its connections while others still make theirs.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
    # torch 2.13: a gloo thread that drops a tensor while the interpreter shuts down aborts the
    # process
    os._exit(0)
