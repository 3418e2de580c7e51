"""Training in chunks and generation on GPUs: bf16 results have the errors of one whole call."""

import itertools

import pytest
import torch

from bmt_burst import (
    Cache,
    Chunks,
    Decoder,
    InfLLMV2,
    Mask,
    SequenceParallel,
    init_sequence_parallel,
)
from bmt_burst.transport import ALONE
from bmt_burst.transport.torch_dist import TorchTransport
from models.config import CPMConfig
from models.cpm import CPM
from tests.cases import random_qkv
from tests.launcher import needs_ranks, run_ranks
from tests.reference import dense_results, relative_error
from tests.rings import shard_results

pytestmark = [pytest.mark.gpu, needs_ranks(1)]

TOKENS, CHUNK, HEADS, KV_HEADS, SIZE = 2051, 500, 8, 2, 128
MASKS = {
    "causal": Mask.causal(TOKENS),
    "documents": Mask.documents((0, 1, 350, 820, 825, 2000, TOKENS)),
    "window": Mask.window(TOKENS, 300),
}
BOUND = 3.0e-3  # rounding of operands and results to 8 bits, as measured: 2 to 3e-3
# beside one call; cudnn's results of each chunk are rounded before they are added up
BESIDE_WHOLE = {"fa4": 1.1, "triton": 1.1, "cudnn": 1.4}
RESULTS = "out", "dq", "dk", "dv"


def make_tensors() -> list[torch.Tensor]:
    return [x.cuda() for x in random_qkv(1, TOKENS, HEADS, KV_HEADS, SIZE, torch.bfloat16, 0)]


def compute_in_chunks(mask: Mask, sp: SequenceParallel, tensors, **options) -> dict:
    """Return this rank's errors of out, dq, dk and dv against fp64."""
    out, _, *grads = dense_results(mask, tensors, SIZE**-0.5)
    chunks = Chunks(mask, CHUNK, 1, sp)
    q, k, v, dout = (chunks.layout.shard(x, sp.rank) for x in tensors)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = torch.empty_like(q)
    for chunk in chunks.forward():
        chunk.attend(0, *(x[:, chunk.span] for x in (q, k, v)), **options)
    for chunk in chunks.backward():
        part = chunk.attend(0, *(x[:, chunk.span] for x in inputs), **options)
        part.backward(dout[:, chunk.span])
        found[:, chunk.span] = part.detach()
    expected = (chunks.layout.shard(x, sp.rank) for x in (out, *grads))
    got = found, *(x.grad for x in inputs)
    return {n: relative_error(*pair) for n, *pair in zip(RESULTS, got, expected, strict=True)}


@pytest.mark.parametrize("flash", BESIDE_WHOLE)
@pytest.mark.parametrize("kind", MASKS)
def test_chunks_have_the_errors_of_the_whole_call(kind, flash):
    mask, tensors = MASKS[kind], make_tensors()
    out, _, *grads = dense_results(mask, tensors, SIZE**-0.5)
    whole = shard_results(tensors, SIZE**-0.5, mask=mask, process_group=ALONE, flash=flash)
    del whole[1]  # lse
    found = compute_in_chunks(mask, SequenceParallel(), tensors, flash=flash)
    for got, expected, (name, error) in zip(whole, (out, *grads), found.items(), strict=True):
        of_whole = relative_error(got, expected)
        assert error < max(BOUND, BESIDE_WHOLE[flash] * of_whole), (name, error, of_whole)


def find_errors(rank: int, size: int) -> dict[str, dict[str, float]]:
    group = TorchTransport(init_sequence_parallel(size).process_group, engine_use="always")
    sp = SequenceParallel(rank, size, process_group=group)
    ways = itertools.product(MASKS, ("auto", "all-gather", "one-call"))
    return {
        f"{kind} {strategy}": compute_in_chunks(MASKS[kind], sp, make_tensors(), strategy=strategy)
        for kind, strategy in ways
    }


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_ranks(size)) for size in (2, 4)])
def test_chunks_over_ranks(size):
    for errors in run_ranks(size, find_errors, size, backend="nccl"):
        assert max(max(found.values()) for found in errors.values()) < 1.2 * BOUND, errors


@pytest.mark.parametrize("window", [None, 300])
def test_new_tokens_attend_to_a_cache(window):
    mask = Mask.causal(TOKENS) if window is None else Mask.window(TOKENS, window)
    tensors = make_tensors()[:3]
    expected, _ = dense_results(mask, tensors, SIZE**-0.5)
    cache, found = Cache(None, 1, TOKENS), []
    with torch.no_grad():
        for part in cache.prefill(1900, CHUNK):
            mine = (part.shard(x[:, :1900]) for x in tensors)
            found.append(part.attend(0, *mine, window))
        for step in (1, 1, 70, 1, TOKENS - 1973):
            now = slice(cache.length, cache.length + step)
            found.append(cache.attend(0, *(x[:, now] for x in tensors), window))
    for got, at in zip(found, itertools.accumulate(x.shape[1] for x in found), strict=True):
        assert relative_error(got, expected[:, at - got.shape[1] : at]) < BOUND


# rotary frequencies that depend on the length, and layers with windows
SCALED = CPMConfig(
    *(512, 256, 384, 4, 8, 2, 64),
    window=100,
    window_pattern="wf",
    rope_scaling={
        "kind": "longrope",
        "original_length": 512,
        "factor": 4.0,
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + n / 32 for n in range(32)],
    },
)


# sparse from 500 tokens on
SPARSE = CPMConfig(
    *(512, 256, 384, 4, 8, 2, 64), sparse=InfLLMV2(window_size=128, topk=4, dense_len=500)
)


def decode(rank: int, size: int) -> list[float]:
    return [error for config in (SCALED, SPARSE) for error in decode_prompts(config, size)]


@torch.inference_mode()
def decode_prompts(config: CPMConfig, size: int) -> list[float]:
    """Return differences of logits with and without a graph, of two prompts and limits."""
    sp = init_sequence_parallel(size) if size > 1 else SequenceParallel()
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = CPM(config, sp).bfloat16()
    results = []
    for prompt, limit in ((450, 600), (1000, 1300)):
        tokens = torch.randint(512, (2, limit), generator=torch.Generator().manual_seed(limit))
        tokens, positions = tokens.cuda(), torch.arange(prompt, device="cuda")
        found = []
        for graph in (True, False):
            cache = Cache(sp, config.num_layers, limit)
            for part in cache.prefill(prompt, 300):
                mine = part.shard(tokens[:, :prompt]), part.shard(positions, 0)
                model(*mine, cache=part)
            decoder, logits = Decoder(model, cache, graph), []
            while cache.length < limit - 2:
                count = 5 if cache.length == prompt + 40 else 1
                logits.append(decoder(tokens[:, cache.length : cache.length + count]))
            found.append(torch.cat(logits, 1))
            assert (decoder._step is not None) == graph
        results.append(relative_error(*found))
    return results


def test_a_graph_decodes_as_steps_without_one():
    assert max(decode(0, 1)) < BOUND


@pytest.mark.ranks
@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_ranks(size)) for size in (2, 4)])
def test_a_graph_decodes_over_ranks(size):
    for errors in run_ranks(size, decode, size, backend="nccl"):
        assert max(errors) < BOUND
