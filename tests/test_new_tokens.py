"""Kernels of new tokens, dense and sparse, against attention written out in fp64.

They run on GPUs where there are some, else in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch.nn import functional

from bmt_burst import Cache, Decoder, InfLLMV2
from bmt_burst.blocks.memory import attend_to_chosen
from bmt_burst.kernels import few_queries
from bmt_burst.memories import keys as memories
from bmt_burst.memories import new_tokens
from bmt_burst.sparse import memory
from bmt_burst.sparse.choice import choose_in_document
from bmt_burst.sparse.compressed import KeySums
from bmt_burst.spec import Spec
from tests.reference import relative_error
from tests.test_cache import generate
from tests.test_chunks import SPARSE, build, on_ranks
from tests.test_decoder import stand_in

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

from bmt_burst.kernels import triton_few_queries
from bmt_burst.sparse import triton_choice, triton_decoding
from bmt_burst.sparse.triton_decoding import DecodingKeys, KeysAtHand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore:(divide by zero|invalid|All-NaN):RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# as in test_triton.py
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products lack bf16
MODULES = [
    pytest.param(few_queries, torch.float64, id="torch"),
    pytest.param(triton_few_queries, torch.float32, id="triton-fp32"),
    pytest.param(triton_few_queries, HALF, id="triton-half"),
]
CASES = {
    # rows of the batch, query heads, kv heads, head size, keys in memory, spans, softcap
    "one query": (1, 8, 2, 16, 150, [(0, 131)], None),
    "one key": (1, 2, 1, 8, 40, [(0, 1)], None),
    "no key": (2, 2, 1, 8, 40, [(0, 0)], None),
    "a window": (2, 4, 4, 24, 160, [(37, 150)], None),
    "a window of new memory": (1, 4, 1, 16, 64, [(64, 64)], None),
    "several queries": (2, 6, 2, 16, 170, [(0, 160 + n) for n in range(7)], None),
    "several in a window": (1, 4, 2, 16, 128, [(n // 2, 70 + 3 * n) for n in range(19)], 1.5),
    "some see no key": (1, 4, 2, 16, 90, [(0, 0), (0, 0), (0, 1), (0, 70)], None),
    "narrow windows": (1, 2, 2, 8, 120, [(3 * n, 3 * n + 2) for n in range(39)], None),
    "odd heads": (3, 5, 5, 40, 77, [(5, 70), (6, 77)], 3.0),
}


def make_tensors(batch, heads, kv_heads, head_size, tokens, spans, dtype):
    """Return q, k, v and spans. Memory before and after them has NaN."""
    chance = torch.Generator().manual_seed(0)
    shapes = (len(spans), heads), (tokens, kv_heads), (tokens, kv_heads)
    q, k, v = (
        torch.randn(batch, *shape, head_size, generator=chance, dtype=torch.float64).to(dtype)
        for shape in shapes
    )
    for x in (k, v):
        x[:, : spans[0][0]] = x[:, spans[-1][1] :] = torch.nan
    return [x.to(DEVICE) for x in (q, k, v, torch.tensor(spans))]


def expect(q, k, v, spans, spec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, S, H, D) and lse (B, S, H) in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    outs, lses = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    share = q.shape[2] // k.shape[2]
    for n, (start, stop) in enumerate(spans.tolist()):
        for head in range(q.shape[2]):
            keys, values = (x[:, start:stop, head // share] for x in (k, v))
            scores = torch.einsum("bd,btd->bt", q[:, n, head], keys) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * (scores / spec.softcap).tanh()
            outs[:, n, head] = torch.einsum("bt,btd->bd", scores.softmax(-1), values)
            lses[:, n, head] = scores.logsumexp(-1)
    return outs, lses


@pytest.mark.parametrize(("module", "dtype"), MODULES)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_attention_written_out(module, dtype, case, monkeypatch):
    monkeypatch.setattr(few_queries, "_SCORES", 1000)
    *sizes, spans, softcap = CASES[case]
    q, k, v, spans = make_tensors(*sizes, spans, dtype)
    spec = Spec(0.3, softcap=softcap)
    out = torch.full_like(q, torch.nan)
    lse = torch.full_like(q[..., 0], torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    module.merge(module.attend(q, k, v, spans, spec), out, lse)
    expected, expected_lse = expect(q, k, v, spans, spec)
    sees = (spans[:, 0] < spans[:, 1]).view(1, -1, 1).expand_as(lse)
    assert out[~sees].eq(0).all() and lse[~sees].eq(-torch.inf).all()
    if sees.any():
        assert relative_error(out[sees], expected[sees]) < BOUNDS[dtype]
        assert (lse - expected_lse)[sees].abs().max() < 1e-5


@pytest.mark.parametrize(("module", "dtype"), MODULES)
def test_keys_are_written_to_their_places_only(module, dtype):
    k, v = torch.randn(2, 2, 5, 3, 8, device=DEVICE).to(dtype)
    before = torch.randn(2, 2, 33, 3, 8, device=DEVICE).to(dtype)
    places = torch.tensor([30, -1, 0, -1, 32], device=DEVICE)
    kept = before.clone()
    module.put(k, v, *kept, places)
    expected = before.clone()
    expected[:, :, [30, 0, 32]] = torch.stack((k, v))[:, :, [0, 2, 4]]
    assert kept.equal(expected)


@pytest.mark.parametrize(("module", "dtype"), MODULES)
def test_a_merge_reads_views(module, dtype):
    """As those of results that ranks gathered. Numbers without a weight do not count."""
    wide = torch.promote_types(dtype, torch.float32)
    packed = torch.randn(3, 2 * 2 * 5 * 9, device=DEVICE, dtype=wide)
    outs, lses = packed[:, :160].view(3, 2, 2, 5, 8), packed[:, 160:].view(3, 2, 2, 5)
    lses[0, 0] = -torch.inf
    shares = lses.double().softmax(0).unsqueeze(-1)
    expected = (outs.double() * shares).sum(0)
    out, lse = outs.new_empty(2, 2, 5, 8), outs.new_empty(2, 2, 5)
    module.merge((outs, lses), out, lse)
    assert relative_error(out, expected) < 1e-6
    assert (lse - lses.double().logsumexp(0)).abs().max() < 1e-6


on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="test_gpu_chunks.py has steps on GPUs")
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [0, 3, 45])
def test_compressed_keys_are_those_of_key_sums(prompt, dtype):
    sparse, limit = InfLLMV2(8, 4, 2, 1, 16, 4, -1), 90
    keys = torch.randn(2, limit, 1, 24, device=DEVICE).to(dtype)
    sums = KeySums(sparse)
    if prompt:
        sums.extend(keys[:, :prompt])
    found = DecodingKeys(sums if prompt else None, keys, limit, sparse)
    for count in (1, 1, 5, 1, 30, 2):
        later = keys[:, sums.tokens : sums.tokens + count]
        found.extend(later, torch.tensor([sums.tokens], device=DEVICE))
        sums.extend(later)
    for row in range(2):
        for x, kept, most in zip(sums.compress(row), found._keys, (1, 4), strict=True):
            first = row * found._strides // most
            assert kept[:, first : first + len(x)].equal(triton_choice.split(x, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_torch(dtype):
    """To the keys at hand. Memory for later ones has NaN. Layers of other heads share tables."""
    sparse, first, end, limit, scale = InfLLMV2(8, 4, 2, 1, 16, 4, -1), 203, 205, 300, 0.3
    chance = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, end, 2, 24, generator=chance).to(dtype) for _ in range(2))
    positions = torch.tensor([p for p in range(limit) if p // 8 % 3 != 1])
    later = len(positions) - int((positions < end).sum())
    kept_k, kept_v = (
        functional.pad(x[:, positions[:-later]], (0, 0, 0, 0, 0, later), value=torch.nan)
        for x in (k, v)
    )
    keys = DecodingKeys(None, k.to(DEVICE), limit, sparse)
    keys.extend(k.to(DEVICE), torch.tensor([0], device=DEVICE))
    at_hand = KeysAtHand.of(positions.to(DEVICE), limit, 8)
    spec, new, prepared = Spec(scale, softcap=2.0), torch.tensor([first], device=DEVICE), {}
    sums, places = KeySums(sparse), torch.arange(first, end)
    sums.extend(k)
    for heads in (4, 68):
        q = torch.randn(2, end - first, heads, 24, generator=chance).to(dtype)
        tensors = [x.to(DEVICE) for x in (q, kept_k, kept_v)]
        out, lse = torch.zeros_like(q, device=DEVICE), torch.zeros(q.shape[:3], device=DEVICE)
        triton_few_queries.merge(
            keys.attend(tensors[0], *tensors, at_hand, new, prepared, spec), out, lse
        )
        for row in range(2):
            chosen = choose_in_document(q[row], places, sums.compress(row), sparse, scale)
            of_row = (x[row].double() for x in (q, kept_k[:, :-later], kept_v[:, :-later]))
            expected = attend_to_chosen(
                *of_row, positions[:-later], places, chosen, sparse.block_size, spec
            )
            assert relative_error(out[row].cpu(), expected[0]) < BOUNDS[dtype]
            assert (lse[row].cpu() - expected[1].T).abs().max() < 1e-5


def use_triton(monkeypatch):
    """Compute new tokens by Triton on any device."""
    for module in (memories, new_tokens):
        monkeypatch.setattr(module, "find_kernels", lambda _: triton_few_queries)
    for module in (memories, memory):
        monkeypatch.setattr(module, "has_kernels", lambda _: True)


def one_at_a_time(monkeypatch):
    """Let threads wait for each other at launches: the interpreter runs one kernel at a time."""
    launch, lock = GridExecutor.__call__, threading.Lock()

    def launch_alone(self, *args, **named):
        with lock:
            return launch(self, *args, **named)

    monkeypatch.setattr(GridExecutor, "__call__", launch_alone)


@on_cpu
@pytest.mark.parametrize(
    ("size", "prompt", "chunk", "steps"),
    [
        (1, 290, 70, (1, 3)),
        (1, 87, None, (2, 1, 1)),  # sparse from 90 tokens on
        (2, 125, 90, (1, 5)),
        (3, 97, 40, (1, 2)),
    ],
)
def test_logits_are_those_of_torch(size, prompt, chunk, steps, monkeypatch):
    """Programs share the blocks of a query and the kernels by which it chooses."""
    monkeypatch.setattr(triton_choice, "_NORMALIZED", 16)
    monkeypatch.setattr(triton_choice, "_SCORED", 4)
    monkeypatch.setattr(triton_decoding, "_MOST_TOKENS", 2)
    one_at_a_time(monkeypatch)
    config = dataclasses.replace(SPARSE, num_layers=1)
    end = prompt + sum(steps)
    tokens = torch.randint(0, 40, (2, end), generator=torch.Generator().manual_seed(5))

    def work(sp):
        cache = Cache(sp, config.num_layers, end + 50)
        return generate(build(config, sp).float(), cache, tokens, prompt, chunk, steps)

    with torch.no_grad():
        expected = on_ranks(size, work)[0]
        use_triton(monkeypatch)
        for found in on_ranks(size, work):
            assert (found - expected).abs().max() / expected.abs().max() < 1e-5


@on_cpu
def test_a_graph_goes_on_where_layers_turn_sparse(monkeypatch):
    """At 90 tokens, where another graph is made."""
    one_at_a_time(monkeypatch)
    use_triton(monkeypatch)
    config = dataclasses.replace(SPARSE, num_layers=1)
    model, prompt, end = build(config).float(), 87, 94
    tokens, positions, found = torch.randint(0, 40, (1, end)), torch.arange(prompt), []
    for graph in (False, True):
        cache = Cache(None, 1, end)
        with torch.no_grad():
            for part in cache.prefill(prompt):
                model(part.shard(tokens[:, :prompt]), part.shard(positions, 0), cache=part)
        with stand_in(model, cache) as standing:
            decoder = Decoder(standing, cache, graph)
            steps = [decoder(tokens[:, n : n + 1]) for n in range(prompt, end)]
            assert standing.replays == (end - 90 if graph else 0)
        found.append(torch.cat(steps, 1))
    assert found[1].equal(found[0])
