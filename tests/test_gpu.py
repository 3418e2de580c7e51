"""What only GPUs can show: kernels, streams, memory, NCCL. Ranks may share a GPU."""

import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import bmt_burst.bias.areas
from bench import live_rows
from bmt_burst import Layout, Mask, burst_attn_func, init_sequence_parallel, kernels, strategies
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.call_bias import CallBias
from bmt_burst.spec import Spec
from bmt_burst.strategies import ring as ring_strategy
from bmt_burst.transport import ALONE
from bmt_burst.transport.torch_dist import TorchTransport
from tests.cases import call_tensors, made_layout, moved, named_calls, random_bias, random_qkv
from tests.launcher import GPUS, RANKS, ROOT, needs_ranks, run_ranks
from tests.reference import dense_results, kernel_errors, relative_error
from tests.rings import rank_results
from tests.test_collectives import error_of_sums

pytestmark = [pytest.mark.gpu, needs_ranks(1)]

HALVES = ("fa4", "cudnn", "fa2", "aten", "triton")
# Rounding of operands and results to 8 (bf16) or 11 (fp16) bits, as measured for one block: 2 to
# 3e-3, 3 to 4e-4.
BOUNDS = {torch.bfloat16: 3.6e-3, torch.float16: 5e-4}
MERGED = 1.4  # the bounds where parts that have been rounded are added up and rounded again
SPEC = Spec(scale=0.1)
CALLS = named_calls(100)
# for what other sizes and dtypes could change
FEW_CALLS = ("causal", "documents", "a window", "tiles apart")


def usable(name: str, q, k, spec: Spec = SPEC):
    """The kernel, or a skip with its reason."""
    reason = kernels.load(name).refuses(spec, q, k)
    if reason:
        pytest.skip(f"{name}: {reason}")
    return kernels.load(name)


def cuda_qkv(*shape, dtype=torch.bfloat16, seed=0):
    return [x.cuda() for x in random_qkv(*shape, dtype, seed)]


def check_call(name, kind, heads, kv_heads, head_size, spec=SPEC):
    """Compare a call with the reference, its backward with out and with delta.

    The tanh of GPUs, which FlashAttention takes, is good to 2^-11 of itself: an lse of 5 or so to
    1e-4.
    """
    dtype = torch.bfloat16
    call = named_calls(100)[kind]  # without what was made for it before
    tensors = [x.cuda() for x in call_tensors(call, 2, heads, kv_heads, head_size, dtype)]
    for x in tensors[2:] if spec.value_size else ():
        x[..., spec.value_size :] = 0.0
    kernel = usable(name, *tensors[:2], spec)
    for with_delta in (False, True):
        errors = kernel_errors(kernel, call, tensors, spec, with_delta)
        assert errors.pop("lse") < (2e-4 if spec.softcap and name != "triton" else 1e-5)
        assert max(errors.values()) < MERGED * BOUNDS[dtype], errors


@pytest.mark.parametrize("kind", [*FEW_CALLS, "full", "causal, more keys"])
@pytest.mark.parametrize(("head_size", "value_size"), [(192, 128), (96, 64)])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_fa4_computes_values_with_heads_of_their_own(kind, head_size, value_size, kv_heads):
    """Without their zeros if there are as many heads of k as of q."""
    spec = dataclasses.replace(SPEC, value_size=value_size)
    check_call("fa4", kind, 8, kv_heads, head_size, spec)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", CALLS)
def test_calls_against_float64(name, kind):
    check_call(name, kind, 8, 2, 64)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", [*FEW_CALLS, "a window to both sides"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(8, 2, 64), (8, 8, 256)])
def test_calls_with_a_softcap(name, kind, heads, kv_heads, head_size):
    check_call(name, kind, heads, kv_heads, head_size, Spec(0.1, softcap=2.0))


@pytest.mark.parametrize(
    "kind", [*FEW_CALLS, "a window to both sides", "causal tiles of fewer keys"]
)
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("by", ["distance", "segments"])
def test_calls_with_a_bias(kind, head_size, by):
    """Distances go beyond what the table tells apart."""
    call, generator = named_calls(100)[kind], torch.Generator().manual_seed(0)
    tensors = [x.cuda() for x in call_tensors(call, 2, 4, 4, head_size, torch.bfloat16)]
    bias = random_bias(call, 4, sum(map(ord, kind)), torch.float32, reach=20)
    if by == "distance":
        places = (
            torch.arange(count, dtype=torch.int32) for count in (call.q_tokens, call.kv_tokens)
        )
        rows = torch.randint(12, (41,), dtype=torch.int32, generator=generator)
        bias = CallBias(
            bias.table, *places, rows, apart=tuple(kv[0] - q[0] for q, kv in call.tiles)
        )
    spec, kernel = SPEC, bias_kernels.load("fa4")
    if reason := kernel.refuses(spec, *tensors[:2]) or kernel.broken():
        pytest.skip(reason)
    for with_delta in (False, True):
        errors = kernel_errors(kernel, call, tensors, spec, with_delta, moved(bias, "cuda"))
        assert errors.pop("lse") < 1e-5
        # The table's gradient is a sum of terms of either sign.
        assert errors.pop("dlearned0") < 4 * BOUNDS[torch.bfloat16]
        assert max(errors.values()) < MERGED * BOUNDS[torch.bfloat16], errors


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(
    "kind", [*FEW_CALLS, "full documents", "a window to both sides", "causal tiles of fewer keys"]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_deterministic_calls_are_equal_in_every_bit(name, kind, heads, kv_heads):
    spec, call = Spec(0.1, deterministic=True), named_calls(300)[kind]
    q, k, v, dout = (x.cuda() for x in call_tensors(call, 2, heads, kv_heads, 64, torch.bfloat16))
    kernel = usable(name, q, k, spec)
    check_call(name, kind, heads, kv_heads, 64, spec)
    results = []
    for _ in range(10):
        out, lse = kernel.forward(q, k, v, call, spec)
        results.append([out, lse, *kernel.backward(dout, q, k, v, out, lse, None, call, spec)])
    for again in results[1:]:
        assert all(a.equal(b) for a, b in zip(again, results[0], strict=True))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", FEW_CALLS)
def test_no_kernel_waits_for_the_gpu(name, kind):
    """Also of a call that comes for the first time."""
    q, k, v, dout = (x.cuda() for x in call_tensors(CALLS[kind], 2, 8, 2, 64, torch.bfloat16))
    kernel = usable(name, q, k)

    def step(call):
        out, lse = kernel.forward(q, k, v, call, SPEC)
        kernel.backward(dout, q, k, v, out, lse, None, call, SPEC)

    step(named_calls(100)[kind])  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    step(named_calls(100)[kind])
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


RESULTS = ("out", "lse", "dq", "dk", "dv", "dlearned")


def call_errors(name: str, rank: int, whole: Layout, tensors, exact, **options) -> dict[str, float]:
    """The errors of this rank's results, and of the gradients of a bias or sinks over all ranks."""
    got, own = rank_results(rank, whole, tensors, exact, 0.1, **options)
    for share in got[5:]:
        dist.all_reduce(share)
    # an lse of padding is -inf
    pairs = [[x.nan_to_num(neginf=0.0) for x in pair] for pair in zip(got, own, strict=True)]
    return {
        f"{result} {name}": relative_error(*pair)
        for result, pair in zip(RESULTS, pairs, strict=False)
    }


def rings(size: int) -> dict[str, dict]:
    """Group arguments by name: copy engines as they are taken by default, NCCL, and a double ring
    if there are four. From now on "auto" means the ring, also for short blocks.

    NCCL may need a GPU for each rank.
    """
    strategies._SHORT = 0.0
    sp = init_sequence_parallel(size)
    found = {
        "by copy engines": {"process_group": TorchTransport(sp.process_group, engine_use="always")}
    }
    if size <= RANKS:
        found["by NCCL"] = {"process_group": TorchTransport(sp.process_group, engine_use="never")}
    if size == 4 <= RANKS:
        found["double"] = {"double_group": init_sequence_parallel(size, inner_size=2).double_group}
    return found


HEADS = (4, 4), (8, 2), (6, 2), (1, 1)
LAYOUTS = ("zigzag", "striped", "contiguous")
STRATEGIES = (
    ("one-call", "by copy engines"),
    ("ulysses", "by copy engines"),
    ("ulysses", "by NCCL"),
    ("usp", "double"),
)
MASKS = {
    "causal": Mask.causal,
    "full": Mask.full,
    "documents": lambda n: Mask.documents((0, 1, 130, 140, n // 2 + 3, n - 7, n)),
    "full documents": lambda n: Mask.documents((0, 300, n), causal=False),
    "window": lambda n: Mask.window(n, 200),
    "documents with a window": lambda n: Mask.documents((0, 64, n // 3, n), window=150),
}


def equality(rank: int, size: int) -> dict[str, float]:
    """The worst error of each of many cases, of all heads in one pass and of a kv head in each.

    Other strategies are in it, too. Of few heads, some ranks of Ulysses have none.
    """
    ring_strategy._ENOUGH_ROWS = 1
    errors, groups = {}, rings(size)
    if size == 4:
        groups["cudnn"] = {**groups["by copy engines"], "flash": "cudnn"}
    for index, (mask, layout) in enumerate(itertools.product(MASKS, (*LAYOUTS, "balanced"))):
        tokens, (heads, kv_heads) = (1024, 1031)[index % 2], HEADS[index // 2 % len(HEADS)]
        visible = MASKS[mask](tokens)
        whole = made_layout(layout, visible, size)
        tensors = cuda_qkv(2, tokens, heads, kv_heads, 64)
        exact = dense_results(visible, tensors, 0.1)
        # q and dout of a kv head
        two_blocks = 2 * 2 * tensors[0][:, : -(-tokens // size), : heads // kv_heads].nbytes
        sizes = (two_blocks, 1 << 30)
        ways = list(itertools.product(("q", "kv"), sizes))
        if size > 2:  # of many ranks on a GPU each call takes long
            ways = [ways[index % 2], ways[3 - index % 2]]
        for (ring, group), (backward, group_bytes) in itertools.product(groups.items(), ways):
            options = {"mask": visible, "backward": backward, "group_bytes": group_bytes, **group}
            name = f"{ring} {layout} {mask} {backward} {heads}:{kv_heads} {tokens} {group_bytes}"
            errors |= call_errors(name, rank, whole, tensors, exact, **options)
        for strategy, ring in STRATEGIES:
            if ring in groups:
                options = {"mask": visible, "strategy": strategy, **groups[ring]}
                name = f"{strategy} {ring} {layout} {mask} {heads}:{kv_heads} {tokens}"
                errors |= call_errors(name, rank, whole, tensors, exact, **options)
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=needs_ranks(4))])
def test_ring_equals_dense(size):
    for errors in run_ranks(size, equality, size, backend="nccl"):
        name, worst = max(errors.items(), key=lambda entry: entry[1])
        assert worst < 1.2 * BOUNDS[torch.bfloat16], (name, worst)


def whole_tensors(_rank: int, size: int) -> list[float]:
    """The errors of gradients of whole tensors over NCCL. Groups have the timeout asked for."""
    errors = []
    for inner in (size, size // 2):
        sp = init_sequence_parallel(size, inner_size=inner, timeout=77.0)
        for group in (sp.process_group, *sp.double_group):
            if group is not None:
                backend = group._get_backend(torch.device("cuda"))
                assert backend.options._timeout.total_seconds() == 77
        errors.append(error_of_sums(sp, "cuda"))
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_ranks(size)) for size in (2, 4)])
def test_whole_tensors_have_gradients(size):
    for errors in run_ranks(size, whole_tensors, size, backend="nccl"):
        assert max(errors) < 1e-12


def biased_equality(rank: int, size: int, tokens: int = 4096) -> dict[str, float]:
    """The errors of a row of CPM-Bee's, many of whose pairs lie in areas of one table row."""
    bmt_burst.bias.areas._LONG = tokens // 32
    few = {"position_bias_num_buckets": 32, "position_bias_max_distance": 64}
    config, errors, groups = dataclasses.replace(live_rows.BEE, **few), {}, rings(size)
    scores = live_rows.bee(tokens, config)
    assert len(scores.terms) > 3
    for layout, heads in (("zigzag", (4, 4)), ("striped", (4, 4)), ("balanced", (4, 2))):
        whole = made_layout(layout, scores.mask, size)
        tensors = cuda_qkv(1, tokens, *heads, 64)
        table = torch.randn(
            config.num_bias_rows, heads[0], generator=torch.Generator().manual_seed(1)
        ).cuda()
        exact = dense_results(scores.mask, tensors, 0.1, scores.dense(), table)
        ways = [
            {**group, "backward": backward} for group in groups.values() for backward in ("q", "kv")
        ]
        for number, way in enumerate([*ways, {**groups["by copy engines"], "strategy": "ulysses"}]):
            options = {"scores": scores, "bias": table, **way}
            name = f"{layout} {heads} {number}"
            errors |= call_errors(name, rank, whole, tensors, exact, **options)
    return errors


def capped_equality(rank: int, size: int, tokens: int = 1024) -> dict[str, float]:
    """The errors of attention with a softcap and with sinks, each kernel and strategy."""
    errors, group = {}, rings(size)["by copy engines"]
    mask, whole = Mask.causal(tokens), Layout.zigzag(tokens, size)
    tensors = cuda_qkv(2, tokens, 8, 2, 64)
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(1)).cuda()
    for softcap in (None, 2.0):
        exact = dense_results(mask, tensors, 0.1, softcap=softcap, sinks=sinks)
        kinds = ("auto", "triton") if softcap else HALVES
        spec = Spec(0.1, softcap=softcap)
        for flash, strategy in itertools.product(kinds, ("ring", "ulysses")):
            if flash != "auto" and kernels.load(flash).refuses(spec, *tensors[:2]):
                continue
            options = {"softcap": softcap, "sinks": sinks, "mask": mask, **group}
            options |= {"flash": flash, "strategy": strategy}
            name = f"{softcap} {flash} {strategy}"
            errors |= call_errors(name, rank, whole, tensors, exact, **options)
    return errors


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_ranks(size)) for size in (2, 4)])
@pytest.mark.parametrize(("work", "learned"), [(biased_equality, 4), (capped_equality, 2)])
def test_ring_with_learned_scores_equals_dense(work, learned, size):
    """The gradient of a table or of sinks is a sum of terms of either sign, each rounded as dv."""
    for errors in run_ranks(size, work, size, backend="nccl"):
        for name, error in errors.items():
            # sinks round out once more
            factor = learned if name.startswith("dlearned") else 1.2 * MERGED
            assert error < factor * BOUNDS[torch.bfloat16], (name, error)


def first_of_few(rank: int, size: int) -> dict[str, float]:
    """The errors of a group's first call, in which the last rank sends and receives nothing."""
    sp, tokens = init_sequence_parallel(size), 400 * size
    visible = Mask.documents((0, tokens * (size - 1) // size, tokens))
    whole = Layout.contiguous(tokens, size)
    tensors = cuda_qkv(1, tokens, 4, 4, 64)
    transport = TorchTransport(sp.process_group, engine_use="never")
    options = {"mask": visible, "process_group": transport, "strategy": "ring"}
    exact = dense_results(visible, tensors, 0.1)
    return call_errors("first", rank, whole, tensors, exact, **options)


@pytest.mark.ranks
@needs_ranks(3)
def test_ranks_without_a_part_in_the_first_exchange_keep_nobody_waiting():
    for errors in run_ranks(3, first_of_few, 3, backend="nccl"):
        assert max(errors.values()) < 1.2 * BOUNDS[torch.bfloat16], errors


def late_ranks(rank: int, size: int) -> None:
    """Kernels that sleep on a rank's stream, anywhere in the ring, change no bit of later calls."""
    *shards, dout = cuda_qkv(1, 2048, 4, 4, 64, seed=rank)
    shards = [x.requires_grad_() for x in shards]
    kernel = kernels.pick("auto", *shards[:2], Spec(0.1, deterministic=True))
    chance = random.Random(rank)
    late = None

    def sleeping(plain):
        def call(*args, **options):
            if late == rank and chance.random() < 0.5:
                torch.cuda._sleep(int(chance.random() * 20_000_000))
            return plain(*args, **options)

        return call

    kernel.forward, kernel.backward = sleeping(kernel.forward), sleeping(kernel.backward)
    for (name, group), backward, group_bytes in itertools.product(
        rings(size).items(), ("q", "kv"), (0, 1 << 30)
    ):
        options = {
            "causal": True,
            "backward": backward,
            "group_bytes": group_bytes,
            "deterministic": True,
            **group,
        }
        results = []
        for late in (None, *range(size)):  # noqa: B007 - read by `sleeping`
            for _ in range(3):  # nothing waits for the GPU between these
                out, lse = burst_attn_func(*shards, 0.1, return_lse=True, **options)
                results.append([out.detach(), lse, *torch.autograd.grad(out, shards, dout)])
        for got in results[1:]:
            assert all(a.equal(b) for a, b in zip(results[0], got, strict=True)), (
                name,
                backward,
                group_bytes,
            )


def repeats(rank: int, size: int) -> None:
    """The same bits every time, and no memory that grows."""
    mask = Mask.causal(700 * size)
    *inputs, dout = cuda_qkv(1, 700, 8, 2, 128, seed=rank)
    inputs = [x.requires_grad_() for x in inputs]
    for name, group in rings(size).items():
        first, free = None, 0
        # processes take turns on a GPU that they share
        for step in range(1000 if size <= GPUS else 200):
            out = burst_attn_func(*inputs, mask=mask, deterministic=True, **group)
            got = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
            first = first or [x.clone() for x in got]
            assert all(a.equal(b) for a, b in zip(got, first, strict=True)), (name, step)
            if step == 100:
                free, _ = torch.cuda.mem_get_info()
        assert torch.cuda.mem_get_info()[0] >= free, name


def host_never_waits(rank: int, size: int) -> None:
    """A step is enqueued while the GPU still sleeps, and the profiler sees no synchronization."""
    *inputs, dout = cuda_qkv(1, 512, 4, 4, 64)
    inputs = [x.requires_grad_() for x in inputs]
    groups = rings(size)
    single = {name: group for name, group in groups.items() if name != "double"}
    ulysses = {f"Ulysses {name}": {**x, "strategy": "ulysses"} for name, x in single.items()}
    for name, group in (groups | ulysses).items():

        def step(group=group):
            torch.autograd.grad(burst_attn_func(*inputs, causal=True, **group), inputs, dout)

        step()
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        with torch.profiler.profile() as profile:
            torch.cuda._sleep(2_000_000_000)
            step()
            done.record()
            assert not done.query(), f"{name}: the host waited for the GPU"
        waits = {e.key for e in profile.key_averages() if "Synchronize" in e.key} - {
            "cudaDeviceSynchronize"
        }
        assert not waits, name  # the profiler itself synchronizes the device when it ends
        torch.cuda.synchronize()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "work",
    [
        late_ranks,
        pytest.param(repeats, marks=pytest.mark.alone),  # it reads a GPU's free memory
        pytest.param(host_never_waits, marks=pytest.mark.alone),  # it is about time
    ],
)
def test_streams(work):
    """With four ranks slots are used again within a call."""
    run_ranks(4, work, 4, backend="nccl")


def falls_out(rank: int, folder: str, how: str) -> None:
    """Rank 1 falls out in a backward. Rank 0's host waits for its GPU, which waits for rank 1."""
    torch.cuda.set_device(rank % GPUS)
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    *inputs, dout = cuda_qkv(1, 512, 4, 4, 64)
    inputs = [x.requires_grad_() for x in inputs]
    transport = TorchTransport(dist.group.WORLD, engine_use="always")
    group = {"process_group": transport, "strategy": "ring"}
    torch.autograd.grad(burst_attn_func(*inputs, causal=False, backward="q", **group), inputs, dout)
    torch.cuda.synchronize()
    transport.set_timeout(10.0)  # the watch waits for half of that
    out = burst_attn_func(*inputs, causal=False, backward="q", **group)
    kernel = kernels.pick("auto", *inputs[:2], SPEC)
    plain, calls = kernel.backward, itertools.count(1)

    def backward(*args, **options):
        if rank and next(calls) == 2:  # of the other rank's queries, which waits for their gradient
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no memory left")
        return plain(*args, **options)

    kernel.backward = backward
    try:
        torch.autograd.grad(out, inputs, dout)
        torch.cuda.synchronize()
    except MemoryError:
        time.sleep(60)  # it lives on
    print("went on", flush=True)


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "reason"),
    [("dies", "has ended"), ("fails", "failed in the backward of call 2: MemoryError")],
)
def test_a_gpu_that_waits_for_a_lost_rank_ends_its_process(tmp_path, how, reason):
    code = (
        "from tests.test_gpu import falls_out; import sys; falls_out(int(sys.argv[1]), "
        f"{str(tmp_path)!r}, {how!r})"
    )
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], **options) for rank in range(2)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1, printed
    assert f"bmt_burst: rank 1 of the group {reason}" in printed
    assert "the GPU of this process waits for it in the backward of call 2" in printed
    assert "went on" not in printed


def test_one_rank_captures_a_whole_sequence_and_refuses_tables():
    tensors = [x.requires_grad_() for x in cuda_qkv(1, 512, 4, 2, 64)[:3]]
    dout = torch.randn_like(tensors[0])

    def step(**mask):
        out = burst_attn_func(*tensors, process_group=ALONE, **mask)
        return [out, *torch.autograd.grad(out, tensors, dout)]

    def capture(**mask):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(**mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step(**mask)
        return graph, results

    graph, results = capture(causal=True)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.detach().clone() for x in results]
    for x, expected in zip(replayed, step(causal=True), strict=True):
        # atomics may change the order of a backward's sums
        assert relative_error(x, expected) < 1e-2
    with pytest.raises(RuntimeError, match="tables that are copied"):
        capture(mask=Mask.documents([0, 100, 512]))
