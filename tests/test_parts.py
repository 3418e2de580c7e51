"""Softmax layers of each kind in each part of a sequence, on each number of ranks: equal to one
process that computes the whole sequence densely, in float64. tests/conformance/test_extensions.py
has those of extensions and of lightning attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bmt_burst import Cache, Chunks, InfLLMV2, Layout, Mask, SequenceParallel
from bmt_burst.extensions import find_kind
from bmt_burst.lightning.memory import Lightning
from bmt_burst.nn import find_part
from bmt_burst.sparse import choose
from tests.test_chunks import on_ranks

EXACT = 1e-10
TOKENS, CHUNK, HEADS, GROUPS, SIZE = 96, 32, 4, 2, 8
BORDERS = {
    "one document": (0, 96),
    "across borders": (0, 20, 41, 96),
    "at borders": (0, 32, 64, 96),
    "within chunks": (0, 3, 9, 30, 33, 60, 70, 96),
}
CHOICE = InfLLMV2(8, 4, 2, 1, 16, 3, -1)
KINDS = {
    "softmax": {},
    "window": {"window": 11},
    "sinks and a soft cap": {"softcap": 2.0, "sinks": True},
    "sparse by other keys": {"sparse": InfLLMV2(8, 4, 2, 1, 16, 3, -1, True)},
}
RANKS = (1, 2, 3, 4, 8)


def make_tensors(name: str, batch: int = 1) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    heads = {"q": HEADS, "k": GROUPS, "v": GROUPS, "dout": HEADS}
    if name == "sparse by other keys":
        heads |= {"by_q": HEADS, "by_k": GROUPS}
    shapes = {x: (batch, TOKENS, count, SIZE) for x, count in heads.items()}
    made = {
        x: torch.randn(shape, dtype=torch.float64, generator=chance) for x, shape in shapes.items()
    }
    if name == "sinks and a soft cap":
        made["sinks"] = torch.randn(HEADS, dtype=torch.float64, generator=chance)
    return made


def make_kind(name: str, tensors: dict[str, Tensor]):
    """Return a kind, and a function of `cut` that returns what it takes besides q, k and v."""
    options = {x: y for x, y in KINDS[name].items() if x not in ("window", "sinks")}
    more = [tensors[x] for x in ("by_q", "by_k") if x in tensors]
    if more:
        options["choose_by"] = more  # cut below
    kind, _ = find_kind(KINDS[name].get("window"), options)
    return kind, lambda cut: (tensors.get("sinks"), *map(cut, more))


def compute_densely(name: str, tensors: dict[str, Tensor], mask: Mask) -> list[Tensor]:
    """Return out and the gradients of q, k, v and sinks, by softmax written out."""
    leaves = {x: tensors[x].clone().requires_grad_() for x in (*"qkv", "sinks") if x in tensors}
    q, k, v = (leaves[x] for x in "qkv")
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * SIZE**-0.5
    if cap := KINDS[name].get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~find_pairs(name, tensors, mask), -torch.inf)
    if "sinks" in leaves:
        sinks = leaves["sinks"].view(1, -1, 1, 1).expand(len(q), -1, TOKENS, 1)
        scores = torch.cat((scores, sinks), 3)
    out = torch.einsum("bhst,bthd->bshd", scores.softmax(3)[..., :TOKENS], v)
    return [out.detach(), *torch.autograd.grad(out, leaves.values(), tensors["dout"])]


def find_pairs(name: str, tensors: dict[str, Tensor], mask: Mask) -> Tensor:
    """Return which pairs are visible: (B, H, S, S) bool."""
    at = torch.arange(TOKENS)
    starts = torch.cat([at.new_full((stop - start,), start) for start, stop in mask.parts])
    seen = (at <= at.unsqueeze(1)) & (starts == starts.unsqueeze(1))
    seen &= at > at.unsqueeze(1) - KINDS[name].get("window", TOKENS)
    sparse = KINDS[name].get("sparse")
    if sparse is None:
        return seen.expand(1, 1, TOKENS, TOKENS)
    given = dataclasses.replace(sparse, use_nope=False)
    chosen = choose(tensors["by_q"], tensors["by_k"], mask, given).long()
    blocks = (at - starts) // sparse.block_size  # of keys, each in its own document
    taken = (chosen.unsqueeze(-1) == blocks).any(-2).transpose(1, 2)  # (B, G, S, S)
    return seen & taken.repeat_interleave(HEADS // GROUPS, 1)


def differentiate(part, layer, kind, tensors, more, cut) -> list[Tensor]:
    """Return out, dq, dk, dv and the share of the gradient of sinks, of this rank's tokens."""
    qkv = [cut(tensors[x]).requires_grad_() for x in "qkv"]
    others = [*more(cut)]
    if "sinks" in tensors:
        others[0] = others[0].clone().requires_grad_()
    out = part.mix(layer, kind, *qkv, *others)
    leaves = qkv + [x for x in others if x is not None and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, cut(tensors["dout"]))]


def whole(sp, kind, tensors, more, mask):
    layout = Layout.zigzag(TOKENS, sp.size)
    part = find_part(sp, None, mask, layout)
    return layout, differentiate(part, 0, kind, tensors, more, lambda x: layout.shard(x, sp.rank))


def in_chunks(sp, kind, tensors, more, mask):
    chunks = Chunks(mask, CHUNK, 1, sp)
    for chunk in chunks.forward():
        chunk.mix(0, kind, *(chunk.shard(tensors[x]) for x in "qkv"), *more(chunk.shard))
    found = []
    for chunk in chunks.backward():
        # a backward of its own, since autograd.grad in a chunk is one, too
        found.insert(0, differentiate(chunk, 0, kind, tensors, more, chunk.shard))
    joined = [torch.cat(x, 1) for x in zip(*(each[:4] for each in found), strict=True)]
    return chunks.layout, [*joined, *map(sum, zip(*(each[4:] for each in found), strict=True))]


@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("compute", [whole, in_chunks])
def test_training_is_that_of_one_dense_process(compute, name, size, borders):
    tensors, mask = make_tensors(name), Mask.documents(BORDERS[borders])
    kind, more = make_kind(name, tensors)
    expected = compute_densely(name, tensors, mask)
    results = on_ranks(size, lambda sp: compute(sp, kind, tensors, more, mask))
    layout = results[0][0]
    parts = [*zip(*(found for _, found in results), strict=True)]
    got = [layout.unshard(part) for part in parts[:4]] + [sum(part) for part in parts[4:]]
    for mine, exact in zip(got, expected, strict=True):
        assert (mine - exact).abs().max() < EXACT


@pytest.mark.parametrize("prompt", [0, 63, 90])
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_new_tokens_are_those_of_one_dense_process(name, size, prompt):
    """New tokens come alone and together, also beyond a block of 64 that one rank keeps."""
    tensors, mask = make_tensors(name, batch=2), Mask.causal(TOKENS)
    kind, more = make_kind(name, tensors)
    expected, *_ = compute_densely(name, tensors, mask)

    @torch.no_grad()
    def work(sp):
        cache, found = Cache(sp, 1, TOKENS), []
        for chunk in cache.prefill(prompt, CHUNK) if prompt else ():

            def cut(x, chunk=chunk):
                return chunk.shard(x[:, :prompt])

            out = chunk.mix(0, kind, *(cut(tensors[x]) for x in "qkv"), *more(cut))
            assert (out - cut(expected)).abs().max() < EXACT
        for start, stop in itertools.pairwise((prompt, prompt + 1, prompt + 2, TOKENS)):

            def cut(x, now=slice(start, stop)):
                return x[:, now]

            found.append(cache.mix(0, kind, *(cut(tensors[x]) for x in "qkv"), *more(cut)))
        return torch.cat(found, 1)

    for out in on_ranks(size, work):
        assert (out - expected[:, prompt:]).abs().max() < EXACT


def run_states(chunks: Chunks, scale: float = 1.0, layers: tuple[int, ...] = (0, 1)) -> None:
    """Take a step of two lightning layers. Values are scaled in the second run, where only some
    layers are computed.
    """
    kind, x = Lightning((0.1, 0.2)), torch.ones(1, 10, 2, 4, dtype=torch.float64)
    for chunk in chunks.forward():
        for layer in (0, 1):
            chunk.mix(layer, kind, x, x, x)
    for chunk in chunks.backward():
        q = x.clone().requires_grad_()
        sum(chunk.mix(layer, kind, q, x, x * scale).sum() for layer in layers).backward()


def test_wrong_second_runs_of_states_are_refused():
    for named, message in (
        ({"scale": 1.01}, "keys, values or states of chunk 1 differ from what the forward kept"),
        ({"layers": (0,)}, "chunk 2 was not computed by 1 of 2 layers, the first is layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run_states(Chunks(Mask.causal(30), 10, 2), **named)
    run_states(Chunks(Mask.causal(30), 10, 2))


def _parts(sp: SequenceParallel) -> Iterator:
    """Yield a part of each kind, of 16 tokens."""
    yield find_part(sp, None, Mask.causal(16 * sp.size))
    chunks = Chunks(Mask.causal(32 * sp.size), 16 * sp.size, 1, sp).forward()
    yield next(chunks)
    chunks.close()
    yield Cache(sp, 1, 16)


KINDS_AND_TENSORS = {
    # what rank 1 passes
    "a name": ("softmax", (), "such as layer.kind, got str"),
    "a class": (Lightning, (), "such as layer.kind, got Lightning"),
    "choices": (CHOICE, (), "such as layer.kind, got InfLLMV2"),
    "no sinks": (find_kind(None, {})[0], (5,), "sinks must be a torch.Tensor, got int"),
    "keys besides sinks": (
        find_kind(None, {})[0],
        (None, torch.ones(1), torch.ones(1)),
        "no tensors besides q, k, v and sinks, got 2 more",
    ),
    "sinks of states": (
        Lightning((0.1,) * HEADS),
        (torch.zeros(HEADS),),
        "lightning attention takes no tensors besides q, k and v, got 1 more",
    ),
    "no log_decay": (Lightning(None), (), "takes log_decay, for it has no slopes, besides q"),
    "growing states": (
        Lightning(None),
        (torch.full((1, 16, HEADS), 0.5),),
        "log_decay must be at most 0, got 0.5",
    ),
    "a log_decay of one head": (
        Lightning(None),
        (torch.zeros(1, 16, 1),),
        r"log_decay must be \(1, 16, 4\), one for each token and head, got shape \(1, 16, 1\)",
    ),
    "a query to choose by": (
        find_kind(None, {"sparse": dataclasses.replace(CHOICE, use_nope=True)})[0],
        (None, torch.ones(1, 16, HEADS, SIZE)),
        "choose_by must be a pair of queries and keys, got 1 items",
    ),
}


@pytest.mark.parametrize("case", KINDS_AND_TENSORS)
def test_wrong_kinds_and_tensors_are_refused_on_all_ranks(case):
    wrong, tensors, message = KINDS_AND_TENSORS[case]

    def work(sp):
        kind, _ = find_kind(None, {})
        for part in _parts(sp):
            given = (wrong, *torch.ones(3, 1, 16, HEADS, SIZE), *tensors)
            if sp.rank == 0:
                given = kind, *given[1:4]
            with pytest.raises((TypeError, ValueError), match=message):
                part.mix(0, *given)

    on_ranks(2, work)


def test_beams_and_drafts_of_states():
    """Rows are chosen in place, and nothing is taken back."""
    kind, x = Lightning((0.1, 0.2)), torch.randn(3, 7, 2, 4, dtype=torch.float64)
    cache, whole = Cache(None, 1, 9), Cache(None, 1, 9)
    cache.mix(0, kind, *(x[:, :6],) * 3)
    cache.select_rows([2, 0, 0])
    whole.mix(0, kind, *(x[[2, 0, 0], :6],) * 3)
    rest = (x[:, 6:],) * 3
    assert cache.mix(0, kind, *rest).equal(whole.mix(0, kind, *rest))
    with pytest.raises(ValueError, match="layer 0 cannot take tokens back: the state of lightning"):
        cache.crop(5)
    with pytest.raises(ValueError, match=r"expected rows of 0 to 2, got \[3\]"):
        cache.select_rows([3])
