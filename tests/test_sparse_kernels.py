"""The kernels of sparse attention against its torch functions: on GPUs where there are some, else
in Triton's interpreter.

The interpreter accepts more than the compiler, so test_triton.py compiles them for a GPU.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from bmt_burst import InfLLMV2, Mask, burst_attn_func
from bmt_burst.blocks import far as torch_far
from bmt_burst.blocks import plan, tiles
from bmt_burst.blocks.far import FarBlocks, FarKeys
from bmt_burst.blocks.tiles import KeyLists, find_between
from bmt_burst.sparse import torch_choice
from bmt_burst.sparse.compressed import CompressedKeys, compress, sum_strides
from bmt_burst.sparse.queries import Choosers
from tests.reference import relative_error
from tests.sparse import random_case

pytest.importorskip("triton")

from bmt_burst.blocks import triton_far
from bmt_burst.sparse import triton_choice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# Operands, probabilities and dscores are rounded to 24 or 11 bits, exponents of up to some tens to
# 24. Found in the interpreter are 2e-6 and 3e-4. On GPUs a product of fp32 is three of TF32.
BOUNDS = {
    torch.float32: 5e-6 if DEVICE == "cpu" else 2e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


# Triton's interpreter is slow, so without GPUs a dtype is enough where scores are exact.
DTYPES = [torch.float16, *([torch.float32] if DEVICE == "cuda" else [])]


def random_blocks(
    chance: random.Random, lengths: list[int], queries: int, groups: int, size: int, window: int
) -> FarBlocks:
    """Choose random blocks for some queries of documents, in any order, beyond a window."""
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    positions = torch.tensor(chance.sample(range(sum(lengths)), queries))
    most = max(lengths) // size + 1
    chosen = torch.full((queries, groups, most), -1, dtype=torch.int32)
    for i, position in enumerate(positions):
        own = int(position - starts[position]) // size
        for group in range(groups):
            # the first block always, as in InfLLM-V2: its list is long
            some = [0, *sorted(chance.sample(range(1, own + 1), chance.randint(0, own)))]
            chosen[i, group, : len(some)] = torch.tensor(some)
    # every third token chooses nothing
    tokens = torch.arange(queries) * 3 // 2
    stops = torch.zeros(2 * queries, dtype=torch.int64)
    stops[tokens] = positions - window
    ends = starts[positions], tokens, stops
    return on_device(FarBlocks.of_choice(chosen, *ends, size, sum(lengths)))


def on_device(blocks: FarBlocks, device: str = DEVICE) -> FarBlocks:
    tables = {name: getattr(blocks, name).to(device) for name in ("starts", "queries", "stops")}
    return dataclasses.replace(blocks, **tables)


def random_tensors(blocks, keys, heads, head_size, dtype=torch.float32):
    """Return q, k, v, dout, and an lse and delta that a backward could have, side by side."""
    queries, groups = len(blocks.stops), blocks.starts.shape[1]
    q, dout = (torch.randn(queries, heads * groups, head_size).to(dtype) for _ in range(2))
    k, v = (torch.randn(keys, groups, head_size).to(dtype) for _ in range(2))
    lse_delta = torch.randn(queries, heads * groups, 2)
    lse_delta[..., 0] = 4 + torch.rand(queries, heads * groups)
    return [x.to(DEVICE) for x in (q, k, v, dout, lse_delta)]


def check(blocks, tensors, first, scale=0.3):
    """Compare out, lse, dq, dk and dv with those of torch. They add to what is there."""
    q, k, v, dout, lse_delta = tensors
    bound = BOUNDS[q.dtype]
    wide = [x.double().cpu() for x in tensors]
    on_cpu = on_device(blocks, "cpu")
    out, lse = torch.randn_like(q).float(), torch.randn(q.shape[1], len(q), device=DEVICE)
    lse[:, ::3] = -torch.inf
    exact, exact_lse = out.double().cpu(), lse.double().cpu()
    far = FarKeys(k, v, blocks, first, scale)
    triton_far.add_far_outputs(q, far, out, lse)
    exact_far = FarKeys(*wide[1:3], on_cpu, first, scale)
    torch_far.add_far_outputs(wide[0], exact_far, exact, exact_lse)
    assert relative_error(out.cpu(), exact) < bound
    assert lse.isneginf().cpu().equal(exact_lse.isneginf())
    assert torch.allclose(lse.double().cpu(), exact_lse, rtol=1e-5, atol=1e-5)
    grads = [torch.randn(x.shape, device=DEVICE) for x in (q, k, v)]
    exact_grads = [x.double().cpu() for x in grads]
    triton_far.add_far_gradients(dout, q, far, lse_delta, *grads)
    torch_far.add_far_gradients(wide[3], wide[0], exact_far, wide[4], *exact_grads)
    for mine, exact in zip(grads, exact_grads, strict=True):
        assert relative_error(mine.cpu(), exact, 1e-3) < bound


@pytest.fixture
def short_lists(monkeypatch):
    """Lists are cut at every fifth entry."""
    monkeypatch.setattr(tiles, "_SHORTEST", 5)
    monkeypatch.setattr(tiles, "_PARTS", 1 << 30)


@pytest.mark.parametrize(("heads", "seed"), [(1, 0), (3, 1), (16, 0)])
def test_far_kernels_equal_torch(seed, heads, short_lists):
    chance = random.Random(seed * 100 + heads)
    lengths = chance.sample([1, 9, 30, 60], 3)
    size = chance.choice((4, 16, 24, 32))
    window = chance.choice((0, 1, 2)) * size
    blocks = random_blocks(chance, lengths, min(sum(lengths), 40), 2, size, window)
    first = chance.choice((0, 7, sum(lengths) // 2))
    keys = chance.randint(1, sum(lengths) - first)
    tensors = random_tensors(blocks, keys, heads, chance.choice((8, 16, 24, 64)))
    check(blocks, tensors, first)


@pytest.mark.parametrize(("block_size", "head_size"), [(64, 128), (128, 64)])
def test_large_blocks_and_heads_in_half_precision(block_size, head_size):
    blocks = random_blocks(random.Random(0), [5 * block_size - 3], 9, 1, block_size, block_size)
    tensors = random_tensors(blocks, 5 * block_size - 3, 4, head_size, torch.float16)
    check(blocks, tensors, 0)


@pytest.mark.parametrize("first", [0, 7, 40])
def test_blocks_by_the_copy_engine_equal_torch(first, short_lists, monkeypatch):
    """Also blocks that begin before the keys at hand, and that end after them."""
    blocks = random_blocks(random.Random(2), [30, 60], 40, 2, 16, 16)
    tensors = random_tensors(blocks, 45, 3, 16)
    if DEVICE == "cuda":
        k, constants = tensors[1], triton_far._constants(*tensors[:2], 16)
        assert triton_far._can_copy(k, constants)
        assert not triton_far._can_copy(k[:, :, :8], constants), "rows have gaps"
    else:
        monkeypatch.setattr(triton_far, "_can_copy", lambda *_: True)
    check(blocks, tensors, first)


@pytest.mark.skipif(DEVICE == "cuda", reason="all of the memory would be real")
def test_heads_may_be_more_than_32_bits_apart(find_overflows):
    """As those of queries (H, S, D) of a long sequence."""
    blocks = random_blocks(random.Random(0), [40], 6, 1, 4, 4)
    q, k, v, *others = random_tensors(blocks, 40, 3, 16, torch.float16)
    far_apart = torch.empty((1 << 31) + (1 << 10), dtype=q.dtype)  # few pages of it are used
    far_apart = far_apart.as_strided(q.shape, (q.shape[2], 1 << 30, 1)).copy_(q)
    check(blocks, [far_apart, k, v, *others], 0)


def test_parts_of_the_keys_add_up_and_queries_without_keys_stay(short_lists, find_overflows):
    """The lse of a query that sees nothing anywhere is -inf in the backward, too."""
    blocks = random_blocks(random.Random(1), [60, 20], 40, 1, 16, 16)
    q, k, v, dout, lse_delta = random_tensors(blocks, 80, 2, 16)
    blind = torch.ones(80, dtype=torch.bool, device=DEVICE)
    blind[blocks.queries] = (blocks.starts < 0).all(-1).all(-1)
    assert 40 < blind.sum() < 80
    lse_delta[blind, :, 0] = -torch.inf

    def compute(cuts):
        out, dq = torch.full_like(q, 7.0), torch.ones_like(q)
        lse = torch.full((2, 80), -torch.inf, device=DEVICE)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for a, b in cuts:
            far = FarKeys(k[a:b], v[a:b], blocks, a, 0.3)
            triton_far.add_far_outputs(q, far, out, lse)
            triton_far.add_far_gradients(dout, q, far, lse_delta, dq, dk[a:b], dv[a:b])
        return out, lse, dq, dk, dv

    whole, parts = compute([(0, 80)]), compute([(0, 23), (23, 31), (31, 31), (31, 80)])
    out, lse, dq, *_ = whole
    assert (out[blind] == 7).all()
    assert lse[:, blind].isneginf().all()
    assert (dq[blind] == 1).all()
    assert all(x.isfinite().all() for x in (out, *whole[2:]))
    assert parts[1][:, ~blind].allclose(lse[:, ~blind], rtol=1e-5)
    for got, exact in zip(parts[2:] + parts[:1], whole[2:] + whole[:1], strict=True):
        assert relative_error(got, exact, 1e-3) < BOUNDS[torch.float32]


def test_there_may_be_more_blocks_than_programs():
    blocks = random_blocks(random.Random(0), [3] * 20, 60, 1, 16, 0)
    check(blocks, random_tensors(blocks, 60, 1, 16), 0)


@pytest.mark.parametrize(
    ("dtype", "head_size", "block_size", "stages"),
    [
        (torch.bfloat16, 128, 64, [3, 2, 3]),
        (torch.bfloat16, 192, 64, [3, 2, 3]),
        (torch.bfloat16, 256, 128, [1, 1, 3]),
        (torch.bfloat16, 512, 64, [1, 0, 1]),
        (torch.float32, 128, 64, [1, 1, 1]),
        (torch.float32, 256, 64, [0, 0, 0]),
    ],
)
def test_stages_fit_into_shared_memory(dtype, head_size, block_size, stages, monkeypatch):
    """The numbers are those of kernels that Triton 3.6 compiled for an H100."""
    monkeypatch.setattr(triton_far, "shared_memory", lambda _: 227 << 10)
    with FakeTensorMode():
        q, k = (torch.empty(1, n, head_size, dtype=dtype, device="cuda") for n in (32, 2))
        found = [triton_far._find_shape(name, q, k, block_size).stages for name in triton_far._HALF]
        assert found == stages
        assert triton_far.fits(q, k, block_size) == all(stages)


def choice_case(seed: int, dtype: torch.dtype, tokens: int | None = None):
    """Return q, places, compressed keys, constants and the scale of queries of a document.

    They are some queries, or all of `tokens`.
    """
    chance = random.Random(seed)
    case = random_case(chance)
    count = tokens or chance.choice((5, 60, 130))
    q = torch.randn(count, case.heads, case.head_size).to(dtype)
    k = torch.randn(count, case.kv_heads, case.head_size).to(dtype)
    places = torch.tensor(sorted(chance.sample(range(count), tokens or chance.randint(1, count))))
    keys = compress(sum_strides(k, case.sparse), case.sparse)
    keys = CompressedKeys(*(x.to(DEVICE) for x in keys))
    return q[places].to(DEVICE), places.to(DEVICE), keys, case.sparse, case.head_size**-0.5


def choosers(places, keys):
    return Choosers.of_document(places.cpu(), len(keys.scored) + 1)


def score(q, places, keys, sparse, scale):
    """Return A (G, T, blocks) of the blocks that a query sees, -inf of others."""
    halves = CompressedKeys(*(triton_choice.split(x, q.dtype) for x in keys))
    tiles = triton_choice.find_tiles(q, choosers(places, keys), sparse, keys.scored.shape[1])
    scorer = triton_choice.Scorer(q.contiguous(), tiles, halves, sparse, scale)
    normalizers = scorer.normalize()
    [piece] = tiles.pieces
    scores, of_last = scorer.score_blocks(piece, normalizers, triton_choice._SPAN)
    before = functional.pad(of_last, (1, -1), value=-1.0)
    block = torch.arange(scores.shape[2], device=DEVICE)
    own = places.unsqueeze(1) // sparse.block_size
    always = (block < sparse.init_blocks) | (block >= own - sparse.window_blocks)
    scores = torch.maximum(scores, before).masked_fill(always, torch.inf)
    return scores.masked_fill(block > own, -torch.inf)


@pytest.mark.parametrize("seed", range(4))
def test_scores_and_choices_equal_torch(seed, monkeypatch):
    dtype = (torch.float32, torch.float16)[seed // 2]
    monkeypatch.setattr(triton_choice, "_SPAN", triton_choice._SPAN if seed % 2 else 32)
    q, places, keys, sparse, scale = choice_case(seed, dtype)
    got = score(q, places, keys, sparse, scale)
    for group, mine in enumerate(got):
        columns = CompressedKeys(*(torch_choice._lay_out(x[:, group]) for x in keys))
        scaled = q.chunk(len(got), 1)[group].float() * scale
        padded = functional.pad(scaled, (0, -q.shape[-1] % torch_choice._ALIGNED))
        # Scores are exponentials of numbers up to some tens, and fp16 holds keys with 22 digits.
        wanted = torch_choice._score_blocks(padded, places, columns, sparse)
        assert torch.allclose(mine, wanted, rtol=5e-5)
    monkeypatch.setattr(triton_choice, "_BYTES", 1)  # pieces of 128 queries
    args = q, choosers(places, keys), keys, sparse, scale
    assert triton_choice.choose_by_score(*args).equal(torch_choice.choose_by_score(*args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_do_not_depend_on_other_queries(dtype):
    q, places, keys, sparse, scale = choice_case(3, dtype, tokens=100)
    if DEVICE == "cpu":  # the interpreter's products depend on where a row is, unless exact
        q, keys = q.round(), CompressedKeys(*(x.round() for x in keys))
    whole = score(q, places, keys, sparse, scale)
    for some in (range(5, 100, 3), range(90, 100), [60]):
        part = score(q[some], places[some], keys, sparse, scale)
        assert part.equal(whole[:, some, : part.shape[2]])
        assert whole[:, some, part.shape[2] :].isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_documents_choose_together_as_each_alone(dtype, monkeypatch):
    """One launch has the queries of all documents. Pieces of scores end within a document."""
    monkeypatch.setattr(triton_choice, "_BYTES", 1)
    sparse = InfLLMV2(8, 4, 2, 1, 16, 2, -1)
    bounds = [0, 32, 90, 95, 128, 300]
    mask, positions = Mask.documents(bounds), torch.arange(20, 290)
    q, k = torch.randn(270, 3, 24).to(dtype).round(), torch.randn(300, 1, 24).to(dtype).round()
    choosers = Choosers.of_tokens(positions, mask, sparse)
    tokens = choosers.strides(2).unsqueeze(1) + torch.arange(2)
    keys = compress(sum_strides(k[tokens.flatten()], sparse), sparse)
    args = (q.to(DEVICE), choosers, CompressedKeys(*(x.to(DEVICE) for x in keys)), sparse, 0.2)
    got = triton_choice.choose_by_score(*args)
    assert got.equal(torch_choice.choose_by_score(*args))
    assert [x.span for x in choosers.documents] == [(32, 90), (95, 128), (128, 300)]
    for (start, stop), (first, last), _ in choosers.documents:
        alone = compress(sum_strides(k[start:stop], sparse), sparse)
        places = positions[choosers.tokens[first:last]] - start
        of_document = Choosers.of_document(places, len(alone.scored) + 1)
        alone = CompressedKeys(*(x.to(DEVICE) for x in alone))
        args = q[choosers.tokens[first:last]].to(DEVICE), of_document, alone, sparse, 0.2
        assert got[first:last].equal(triton_choice.choose_by_score(*args))


def test_equal_keys_tie(find_overflows):
    """Blocks with the same keys have the same scores, bit for bit, and the lower one is taken."""
    q, places, keys, sparse, scale = choice_case(3, torch.float32, tokens=60)
    if DEVICE == "cpu":  # the interpreter's products depend on where a key is, unless exact
        q = q.round()
    keys = CompressedKeys(torch.ones_like(keys.scored), keys.normalizing)
    scores = score(q, places, keys, sparse, scale)
    assert (scores[:, -1].isfinite().sum(1) > 3).all()
    assert all(row[row.isfinite()].unique().numel() <= 1 for row in scores.flatten(0, 1))
    args = q, choosers(places, keys), keys, sparse, scale
    assert triton_choice.choose_by_score(*args).equal(torch_choice.choose_by_score(*args))


@pytest.mark.parametrize(("blocks", "topk"), [(1, 2), (50, 9), (70, 70), (2000, 96), (5000, 96)])
def test_the_largest_are_taken_and_the_lower_of_equal_ones(blocks, topk):
    sparse = InfLLMV2(block_size=16, window_size=32, topk=topk, dense_len=-1)
    scores, of_last = torch.randint(-1, 6, (2, 1, 12, blocks), device=DEVICE).float()
    scores[:, 1], of_last[:, 1] = 1.0, -1.0
    scores[:, 2:6] = torch.rand(4, blocks, device=DEVICE)
    scores[:, 6, ::3] = torch.finfo(torch.float32).max
    own = torch.randint(blocks, (12,)).sort().values
    own[-1] = blocks - 1
    places = (own * 16 + 3).to(DEVICE)
    chosen = torch.full((12, 1, sparse.most_blocks), -1, dtype=torch.int32, device=DEVICE)
    triton_choice.take_largest(scores, of_last, places, chosen, sparse)
    block, own = torch.arange(blocks, device=DEVICE), own.to(DEVICE).unsqueeze(1)
    largest = torch.maximum(scores, functional.pad(of_last, (1, -1), value=-1.0))[0]
    largest[(block < 1) | (block >= own - 2)] = torch.inf
    largest[block > own] = -torch.inf
    assert chosen[:, 0].equal(torch_choice._take_largest(largest, sparse.most_blocks))


def test_inputs_may_have_any_strides(monkeypatch):
    """Kernels add to gradients of them, whose rows are dense."""
    monkeypatch.setattr(plan, "find_kernels", lambda q, far: triton_far)
    sparse, mask = InfLLMV2(8, 4, 2, 1, 16, 2, -1), Mask.documents([0, 30, 100])
    tensors = [torch.randn(1, 100, heads, 16, device=DEVICE) for heads in (4, 2, 2)]
    found = []
    for change in (lambda x: x.clone(), lambda x: x.mT.contiguous().mT):
        inputs = [change(x).requires_grad_() for x in tensors]
        out = burst_attn_func(*inputs, mask=mask, sparse=sparse)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for plain, other in zip(*found, strict=True):
        assert torch.allclose(plain, other, rtol=0, atol=1e-5 * float(plain.abs().max()))


def test_lists_do_not_wait_for_the_device():
    """Fake tensors have no values that the host could read."""
    with FakeTensorMode():
        starts, stops = torch.zeros(3000, 2, 4, dtype=torch.int32), torch.arange(3000)
        blocks = FarBlocks(starts, stops, stops, 4, 900, stops)
        find_between(KeyLists.of_blocks(blocks).starts, 3, 700)


def test_no_queries_or_no_keys_change_nothing():
    starts, stops = torch.full((3, 1, 2), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    blocks = FarBlocks(starts, torch.arange(3), stops, 16, 4, stops)
    q, k = torch.ones(3, 2, 16, device=DEVICE), torch.ones(4, 1, 16, device=DEVICE)
    for some_q, some_k, some in ((q, k[:0], blocks), (q[:0], k, cut(blocks, 0)), (q, k, blocks)):
        some = on_device(some)
        out, dq = some_q.clone(), some_q.clone()
        lse = torch.full((2, len(some_q)), -torch.inf, device=DEVICE)
        rows = torch.zeros(*some_q.shape[:2], 2, device=DEVICE)
        far = FarKeys(some_k, some_k, some, 0, 1.0)
        triton_far.add_far_outputs(some_q, far, out, lse)
        assert out.equal(some_q)
        assert lse.isneginf().all()
        grads = dq, torch.zeros_like(some_k), torch.zeros_like(some_k)
        triton_far.add_far_gradients(some_q, some_q, far, rows, *grads)
        assert dq.equal(some_q)
        assert not any(x.any() for x in grads[1:])


def cut(blocks: FarBlocks, count: int) -> FarBlocks:
    tables = {name: getattr(blocks, name)[:count] for name in ("starts", "queries", "stops")}
    return dataclasses.replace(blocks, **tables)
