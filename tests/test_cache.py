"""Generation over ranks: its logits are those of one forward of the whole sequence."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmt_burst import Cache, InfLLMV2, Layout, Mask, SequenceParallel, nn
from bmt_burst.base.streams import Flag
from bmt_burst.errors import RankFailed, RanksDisagree
from bmt_burst.extensions import find_kind
from bmt_burst.kernels import few_queries
from bmt_burst.lightning.memory import Lightning
from bmt_burst.transport import sockets
from models.cpm import CPM
from tests.launcher import run_ranks
from tests.test_chunks import DENSE, LARGEST, NOPE, SCALED, SPARSE, build, on_ranks, two_layers

WINDOWED = dataclasses.replace(SCALED, rope_scaling=None)


def generate(
    model: CPM,
    cache: Cache,
    tokens: torch.Tensor,
    prompt: int,
    chunk: int | None,
    steps: tuple[int, ...],
    layout: str = "zigzag",
) -> torch.Tensor:
    """Return the logits from the prompt's last token on. `steps` are numbers of new tokens."""
    found, positions = [], torch.arange(tokens.shape[1])
    for part in cache.prefill(prompt, chunk, layout) if prompt else ():
        mine = part.shard(tokens[:, :prompt]), part.shard(positions[:prompt], 0)
        found.append(model(*mine, cache=part))
    for step in steps:
        now = slice(cache.length, cache.length + step)
        found.append(model(tokens[:, now], positions[now], cache=cache))
    return torch.cat(found, 1)


CASES = [
    # config, numbers of ranks, tokens of the prompt, of a chunk, of the steps after it, layout
    (DENSE, (1, 4), 61, 20, (1, 1, 1, 10, 1, 75), "zigzag"),
    (DENSE, (3,), 61, None, (1, 66), "striped"),
    (DENSE, (2, 3), 0, None, (3, 1, 190, 1, 4), "zigzag"),
    (WINDOWED, (3,), 70, 31, (1, 1, 30, 1, 80, 1, 1, 5), "contiguous"),
    (WINDOWED, (1, 4), 40, 9, (1,) * 20, "striped"),
    (SPARSE, (1, 3), 150, 40, (1, 5, 1, 60, 1), "zigzag"),
    (SPARSE, (4,), 160, None, (1, 1, 1), "striped"),
    (SPARSE, (2,), 60, 30, (20, 20, 1), "zigzag"),
    (NOPE, (3,), 150, 40, (1, 5, 1), "zigzag"),
    (NOPE, (2,), 0, None, (60, 40, 1), "zigzag"),
    (NOPE, (2,), 60, 30, (20, 20, 1), "zigzag"),
]
FLAT = [
    pytest.param(config, size, *case, id=f"{number}-{size}")
    for number, (config, sizes, *case) in enumerate(CASES)
    for size in sizes
]


@pytest.mark.parametrize(("config", "size", "prompt", "chunk", "steps", "layout"), FLAT)
def test_logits_are_those_of_the_whole_forward(
    config, size, prompt, chunk, steps, layout, monkeypatch
):
    monkeypatch.setattr(few_queries, "_SCORES", 2000)
    config = two_layers(config)
    end = prompt + sum(steps)
    tokens = torch.randint(0, 40, (2, end), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = build(config)(tokens, torch.arange(end))[:, max(prompt - 1, 0) :]

        def work(sp):
            cache = Cache(sp, config.num_layers, end)
            return generate(build(config, sp), cache, tokens, prompt, chunk, steps, layout)

        results = on_ranks(size, work)
    for logits in results:
        assert torch.equal(logits, results[0])
        assert logits.shape == whole.shape
        assert (logits - whole).abs().max() / whole.abs().max() < LARGEST


def step(model: CPM, cache: Cache, tokens: int = 1, rows: int = 1, **more) -> None:
    new = torch.zeros(rows, tokens, dtype=torch.int64)
    model(new, torch.arange(cache.length, cache.length + tokens), cache=cache, **more)


def fill(model: CPM, cache: Cache, tokens: int, chunk: int | None = None) -> None:
    for part in cache.prefill(tokens, chunk):
        positions = part.shard(torch.arange(tokens), 0)
        model(torch.zeros(1, len(positions), dtype=torch.int64), positions, cache=part)


def begin_twice(model, cache, rank):
    step(model, cache)
    fill(model, cache, 10)


def leave_a_prefill(model, cache, rank):
    next(cache.prefill(20))
    step(model, cache)


def skip_a_layer(model, cache, rank):
    model.layers[0](torch.zeros(1, 1, 32).double(), *(torch.zeros(1, 4),) * 2, cache)
    model.layers[0](torch.zeros(1, 1, 32).double(), *(torch.zeros(1, 4),) * 2, cache)


def change_rows(model, cache, rank):
    step(model, cache)
    step(model, cache, rows=2)


def take_back(model, cache, rank):
    fill(model, cache, 20)
    step(model, cache, 4)
    if rank == 0:  # the other one has not noticed that its draft was rejected
        cache.length -= 2
    step(model, cache)


def cut_otherwise(model, cache, rank):
    positions = Layout.zigzag(80, 2).positions(rank)
    for part in cache.prefill(80, 20):
        mine = positions[part.span]
        model(torch.zeros(1, len(mine), dtype=torch.int64), mine, cache=part)


def mix_prefills(model, cache, rank):
    for parts in zip(cache.prefill(20, 10), cache.prefill(20, 10), strict=True):
        for part in parts:
            positions = part.shard(torch.arange(20), 0)
            model(torch.zeros(1, len(positions), dtype=torch.int64), positions, cache=part)


def turn_sparse(model, cache, rank):
    fill(model, cache, 50)
    x = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    cache.attend(0, x, x, x, sparse=InfLLMV2())


def attend_to(cache, v):
    """Pass v, or a tensor of 0 in its place."""
    x = torch.zeros(1, 1, 2, 8)
    cache.attend(0, x, x, x if v is None else v)


def attend_otherwise(options):
    """Return a use of a Cache: in later layers rank 1 passes options, or it changes their order."""

    def do(model, cache, rank):
        x = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
        for layer in (0, 1, 2) if options or not rank else (0, 2, 1):
            cache.attend(layer, x, x, x, **(options if rank and layer else {}))

    return do


def attend(*calls):
    """Return a use of a Cache: calls of layers, each with its number of new tokens."""

    def do(model, cache, rank):
        for layer, tokens in calls:
            x = torch.zeros(1, tokens, 2, 8)
            cache.attend(layer, x, x, x)

    return do


WRONG = {
    "a long prompt": (
        lambda model, cache, rank: fill(model, cache, 101),
        "the cache is full: it has a limit of 100 tokens, expected at most 100 new ones, got 101",
    ),
    "a full cache": (
        lambda model, cache, rank: (fill(model, cache, 99), step(model, cache, 2)),
        "the cache is full: .* at most 1 new ones, got 2: make a Cache with a larger limit",
    ),
    "short chunks": (lambda model, cache, rank: fill(model, cache, 50, 1), "too short for 2 ranks"),
    "chunks that differ": (
        lambda model, cache, rank: fill(model, cache, 50, 20 + rank * 10),
        "ranks differ in ",
    ),
    "new tokens that differ": (
        lambda model, cache, rank: step(model, cache, 1 + rank),
        "ranks differ in shapes of a Cache",
    ),
    "rows that change": (change_rows, "as in earlier calls of layer 0, got"),
    "a second prefill": (begin_twice, "expected an empty Cache, got one with 1 tokens"),
    "an unfinished prefill": (leave_a_prefill, "expected a Cache whose prefill has ended"),
    "tokens that are taken back": (
        take_back,
        "length of a Cache is read-only: expected 24, got 22: take new tokens back with cache.crop",
    ),
    "a prompt of another layout": (
        cut_otherwise,
        "positions that do not fall .* each chunk by chunk.sha",
    ),
    "two prefills at once": (
        mix_prefills,
        r"no chunk after the loop over prefill\(\), or once another one began",
    ),
    "too much memory": (
        lambda model, cache, rank: step(model, Cache(cache.sp, 3, 1 << 60)),
        f"not enough memory for the keys and values of {1 << 60:,} tokens",
    ),
    "sparse attention after dense": (
        turn_sparse,
        "expected extension=None, as in earlier calls of layer 0, got extension=InfLLMV2",
    ),
    "a list for values": (
        lambda model, cache, rank: attend_to(cache, [] if rank else None),
        "v must be a torch.Tensor, got list",
    ),
    "a mask of rows": (
        lambda model, cache, rank: (step(model, cache), cache.select_rows([True] if rank else [0])),
        "each of rows must be a whole number, got True",
    ),
    "rows of an empty cache": (
        lambda model, cache, rank: cache.select_rows([0]),
        "expected a Cache that has tokens, got an empty one",
    ),
    "a module for a layer": (
        lambda model, cache, rank: attend((model.norm if rank else 0, 1))(model, cache, rank),
        "layer must be a whole number, got RMSNorm",
    ),
    "a prompt of one token": (
        lambda model, cache, rank: fill(model, cache, 1),
        "a prompt of at least 2 tokens, .* got 1: without a prefill, pass them as new tokens",
    ),
    "other tokens in a layer": (
        attend((0, 2), (1, 1)),
        "expected 2 new tokens in layer 1, as in earlier layers, got 1",
    ),
    "another window in a later layer": (
        attend_otherwise({"window": 3}),
        "ranks differ in kind of a Cache",
    ),
    "sinks in a later layer": (
        attend_otherwise({"sinks": torch.zeros(2, dtype=torch.float64)}),
        "ranks differ in tensors besides q, k and v of a Cache",
    ),
    "layers in another order": (attend_otherwise({}), "ranks differ in layer of a Cache"),
    "sinks of other heads": (
        attend_otherwise({"sinks": torch.zeros(3, dtype=torch.float64)}),
        r"sinks must be \(2,\), one for each query head, got shape \(3,\)",
    ),
    "a skipped layer": (skip_a_layer, "layer 1 has 0 tokens, layer 0 has 1: expected all 3 layers"),
    "an error of one rank": (
        lambda model, cache, rank: fill(model, cache, 50 if rank else "50"),
        "length must be a whole number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_raises_on_all_ranks(case):
    do, message = WRONG[case]

    @torch.no_grad()
    def work(sp):
        try:
            do(build(DENSE, sp), Cache(sp, 3, 100), sp.rank)
        except (TypeError, ValueError, AttributeError) as error:
            return str(error)
        return "no error"

    for said in on_ranks(2, work):
        assert re.search(message, said)


@pytest.mark.parametrize("size", [1, 2])
def test_a_prefill_that_failed_may_start_again(size):
    """What the first attempt kept, also for the choice of sparse attention, does not count."""
    tokens = torch.randint(0, 40, (1, 150), generator=torch.Generator().manual_seed(5))

    @torch.no_grad()
    def work(sp):
        model, cache = build(SPARSE, sp), Cache(sp, 3, 150)
        for first in cache.prefill(140, 60):
            model(first.shard(tokens), first.shard(torch.arange(140), 0), cache=first)
            break
        return generate(model, cache, tokens, 140, 40, (1,) * 10)

    whole = build(SPARSE)(tokens, torch.arange(150))[:, 139:]
    for logits in on_ranks(size, work):
        assert (logits - whole).abs().max() / whole.abs().max() < LARGEST


def test_drafts_are_taken_back():
    """What stays is as if there had been no draft."""
    tokens = torch.randint(0, 40, (2, 130), generator=torch.Generator().manual_seed(5))
    draft = (tokens + 1) % 40

    @torch.no_grad()
    def work(sp):
        model, cache = build(WINDOWED, sp), Cache(sp, 3, 130)
        found = [generate(model, cache, tokens, 40, 20, (30,))]
        for stays in (40, 55, 70):
            cache.crop(stays)
            at = torch.arange(stays, stays + 20)
            model(draft[:, at], at, cache=cache)
            cache.crop(stays)
            at = torch.arange(stays, 130)
            found.append(model(tokens[:, at], at, cache=cache))
        return found

    whole = build(WINDOWED)(tokens, torch.arange(130))
    for found in on_ranks(3, work):
        for logits, start in zip(found[1:], (40, 55, 70), strict=True):
            assert (logits - whole[:, start:]).abs().max() / whole.abs().max() < LARGEST


def test_an_error_in_the_middle_of_a_token_is_taken_back():
    """On all ranks, as long as no layer has states or sums."""
    tokens = torch.randint(0, 40, (1, 90), generator=torch.Generator().manual_seed(5))

    @torch.no_grad()
    def work(sp):
        model, cache = build(DENSE, sp), Cache(sp, 3, 90)
        generate(model, cache, tokens, 60, None, (5,))

        def fail(*_):
            raise RuntimeError("a hook")

        hook = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="a hook"):
            model(tokens[:, 65:70], torch.arange(65, 70), cache=cache)
        hook.remove()
        with pytest.raises(ValueError, match="layer 1 has 65 tokens, layer 0 has 70"):
            cache.crop(66)
        cache.crop(65)
        return model(tokens[:, 65:], torch.arange(65, 90), cache=cache)

    whole = build(DENSE)(tokens, torch.arange(90))[:, 65:]
    for logits in on_ranks(2, work):
        assert (logits - whole).abs().max() / whole.abs().max() < LARGEST


@pytest.mark.parametrize("config", [WINDOWED, SPARSE, NOPE], ids=["windows", "sparse", "use_nope"])
def test_rows_of_a_cache_are_chosen(config):
    """As beams are: repeated, in another order, and fewer."""
    tokens = torch.randint(0, 40, (2, 150), generator=torch.Generator().manual_seed(5))

    @torch.no_grad()
    def work(sp):
        model, cache, found = build(config, sp), Cache(sp, 3, 150), []
        generate(model, cache, tokens[:, :120], 100, None, (19, 1))
        for start, rows in ((120, [1, 0]), (130, [1, 0, 0]), (140, [2])):
            cache.select_rows(rows)
            at = torch.arange(start, start + 10)
            texts = {120: [1, 0], 130: [0, 1, 1], 140: [1]}[start]
            found.append((texts, model(tokens[texts][:, at], at, cache=cache)))
        return found

    whole = build(config)(tokens, torch.arange(150))
    for found in on_ranks(2, work):
        for (rows, logits), start in zip(found, (120, 130, 140), strict=True):
            expected = whole[rows, start : start + 10]
            assert (logits - expected).abs().max() / whole.abs().max() < LARGEST


def test_rows_are_copied_at_the_places_in_use():
    x, cache = torch.randn(2, 3, 2, 8), Cache(None, 1, 100_000)
    cache.attend(0, x, x, x)
    keys = cache._memories[0].kept[0]
    keys[:, 3:] = torch.arange(2).view(2, 1, 1, 1)
    cache.select_rows([1, 0])
    assert keys[:, :3].equal(x.flip(0)) and (keys[1, 3:] == 1).all()
    cache.select_rows([1])
    assert cache._memories[0].kept[0][:, :3].equal(x[:1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_are_chosen_in_another_mode_than_tokens_are_computed_in(mode):
    other, cache = ({torch.no_grad, torch.inference_mode} - {mode}).pop(), Cache(None, 1, 8)
    with mode():
        x = torch.randn(2, 3, 2, 8)
        cache.attend(0, x, x, x)
    with other():
        cache.select_rows([1])
    with mode():
        assert cache.attend(0, x[:1, :1], x[:1, :1], x[:1, :1]).shape == (1, 1, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_ranks_that_are_given_other_tokens_find_it(config, dtype):
    @torch.no_grad()
    def work(sp):
        model, cache = build(config, sp).to(dtype), Cache(sp, 3, 300)
        tokens = torch.randint(0, 40, (1, 120), generator=torch.Generator().manual_seed(5))
        generate(model, cache, tokens, 100, None, (1,) * 10)
        step = torch.full((1, 3), 7)
        step[0, 1] += sp.rank
        model(step, torch.arange(110, 113), cache=cache)
        for _ in range(2):  # the cache holds both from then on
            with pytest.raises(ValueError, match="holds both: choose each token on one rank"):
                model(step, torch.arange(113, 116), cache=cache)

    on_ranks(2, work)


@pytest.mark.parametrize(
    ("config", "rows", "change"),
    [
        (DENSE, 64, (1, 0)),  # one row has another token
        (DENSE, 2, (0, 1)),  # another position
        (dataclasses.replace(DENSE, attention_rotary=False), 2, (0, 1)),
        (dataclasses.replace(DENSE, mixers=("lightning",) * 3), 2, (1, 0)),
    ],
    ids=["a row", "positions", "positions that keys do not have", "lightning attention alone"],
)
def test_small_differences_of_new_tokens_are_found(config, rows, change):
    @torch.no_grad()
    def work(sp):
        model, cache = build(config, sp).bfloat16(), Cache(sp, 3, 30)
        tokens = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(5))
        tokens = tokens.repeat(rows, 1)
        generate(model, cache, tokens, 20, None, (1,))
        token, position = (sp.rank * by for by in change)
        step, at = tokens[:, 21:22].clone(), torch.arange(21, 22)
        step[0] = (step[0] + token) % 40
        model(step, at + position, cache=cache)
        with pytest.raises(ValueError, match="given other new tokens or positions"):
            model(step, at + 1, cache=cache)

    on_ranks(2, work)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_new_tokens_of_nan_on_one_rank_differ(ranks):
    def work(sp):
        x, cache = torch.ones(1, 1, 2, 8), Cache(sp, 1, 10)
        cache.attend(0, x, x, x * torch.nan if sp.rank in ranks else x)
        # weights that diverged give NaN on all
        differ = pytest.raises(ValueError, match="given other new tokens or positions")
        with differ if len(ranks) == 1 else nullcontext():
            cache.attend(0, x, x, x)

    on_ranks(2, work)


def test_new_tokens_have_no_backward():
    """Gradients of weights would leave attention out."""
    model, tokens = build(DENSE), torch.zeros(1, 5, dtype=torch.int64)
    loss, _ = model(tokens, torch.arange(5), tokens, cache=Cache(None, 3, 9))
    x, sinks = torch.ones(1, 5, 2, 8), torch.zeros(2, requires_grad=True)
    for out in (loss, Cache(None, 1, 9).attend(0, x, x, x, sinks=sinks).sum()):
        with pytest.raises(ValueError, match="a Cache have no backward: call backward on the loss"):
            out.backward()


def test_wrong_arguments_are_refused():
    for arguments, message in (((0, 10), "layers must be at least 1"), ((1, 0), "limit must be")):
        with pytest.raises(ValueError, match=message):
            Cache(None, *arguments)
    with pytest.raises(AttributeError, match="limit"):
        Cache(None, 1, 10).limit = 20
    with pytest.raises(TypeError, match=r"sp must be a SequenceParallel, .*, got int"):
        Cache(2, 1, 10)


def test_tensors_without_rows_or_heads_are_refused():
    x, cache = torch.randn(1, 1, 2, 8), Cache(None, 1, 10)
    for q, k in ((x[:0], x[:0]), (x, x[:, :, :0])):
        with pytest.raises(ValueError, match="heads and head size above 0"):
            cache.attend(0, q, k, k)
    assert cache.length == 0


def test_layers_and_lengths_may_be_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    x, cache = torch.randn(1, 3, 2, 8), Cache(None, 1, 10)
    cache.attend(numpy.int64(0), x, x, x)
    cache.crop(numpy.int64(2))
    assert cache.length == 2 and type(cache.length) is int


@pytest.mark.parametrize("name", ["softcap", "softmax_scale"])
def test_other_scores_than_in_earlier_calls_are_refused(name):
    x, cache = torch.randn(1, 3, 2, 8), Cache(None, 1, 10)
    cache.attend(0, x, x, x, **{name: 2.0})
    with pytest.raises(ValueError, match=f"expected {name}=2.0, as in earlier calls of layer 0"):
        cache.attend(0, x, x, x)


def test_ranks_with_other_tokens_in_one_of_many_rows_find_it():
    def work(sp):
        v = torch.randn(512, 2, 2, 64, generator=torch.Generator().manual_seed(5))
        v[200, 1] = torch.randn(2, 64, generator=torch.Generator().manual_seed(6 + sp.rank))
        cache, v = Cache(sp, 1, 10), v.bfloat16()
        cache.attend(0, v, v, v)
        with pytest.raises(ValueError, match="given other new tokens"):
            cache.attend(0, v, v, v)

    on_ranks(2, work)


def test_other_tokens_are_found_by_a_host_that_runs_ahead(monkeypatch):
    """As on a GPU, which answers some steps late."""

    class Late(Flag):
        asked = 0

        def is_set(self):
            self.asked += 1
            return super().is_set() if self.asked > 3 else None

    monkeypatch.setattr("bmt_burst.parts.cache.Flag", Late)

    def work(sp):
        same = torch.ones(1, 1, 2, 8)
        cache, other = Cache(sp, 1, 10), same * (1 + sp.rank)
        for x in (other, same, same, same):
            cache.attend(0, x, x, x)
        with pytest.raises(ValueError, match="given other new tokens"):
            cache.attend(0, same, same, same)

    on_ranks(2, work)


def test_states_of_fewer_key_heads_are_refused():
    x = torch.randn(1, 3, 2, 8)
    one = x[:, :, :1]
    with pytest.raises(ValueError, match=r"expected k of .* rows, heads and head size"):
        Cache(None, 1, 10).mix(0, Lightning((0.1, 0.2)), x, one, one)


def attend_in_a_cache(sp: SequenceParallel) -> Callable[..., Any]:
    cache, x = Cache(sp, 2, 10), torch.ones(1, 1, 2, 8)
    return lambda layer=1, **options: cache.attend(layer, x, x, x, **options)


def attend_in_layers(sp: SequenceParallel) -> Callable[..., Any]:
    layers = [nn.BurstAttention(16, 2, sp=sp, layer=layer) for layer in range(2)]
    cos, sin = nn.rope_tables(torch.zeros(1), 8)
    given = {"x": torch.ones(1, 1, 16), "cos": cos, "sin": sin, "cache": Cache(sp, 2, 10)}
    return lambda layer=1, **changes: layers[layer](**given | changes)


IN_THE_MIDDLE = [
    (attend_in_a_cache, {"unknown": 1}, "unexpected keyword argument 'unknown'"),
    (attend_in_a_cache, {"layer": 0}, "layer 1 has 1 tokens, layer 0 has 2: expected all 2 layers"),
    (attend_in_a_cache, {"layer": 2}, "expected a layer below 2 in this Cache, got 2"),
    (attend_in_layers, {"x": torch.ones(1, 1, 15)}, "x must be (batch, tokens, 16)"),
    (attend_in_layers, {"unknown": 1}, "keyword argument 'unknown'"),
    (attend_in_layers, {"mask": Mask.causal(1)}, "expected a Cache or a mask and layout, got both"),
]


@torch.no_grad()
def fail_in_the_middle(rank: int) -> list[tuple[str, float]]:
    """Return errors and their seconds. Rank 1 is wrong in a second token's last layer."""
    sockets._FAILING, found = 1.5, []  # seconds to wait for the other rank to fail, too
    for make, wrong, _ in IN_THE_MIDDLE:
        attend = make(SequenceParallel(rank, 2, process_group=dist.new_group([0, 1])))
        for layer in (0, 1, 0):
            attend(layer)
        begun = time.monotonic()
        with pytest.raises((TypeError, ValueError, RankFailed)) as caught:
            attend(**wrong if rank else {})
        found.append((str(caught.value), time.monotonic() - begun))
    return found


def test_an_error_in_the_middle_of_new_tokens_is_reported_at_once():
    """The other ranks already compute the layer, and send no line."""
    for found in run_ranks(2, fail_in_the_middle):
        for (text, seconds), (_, _, message) in zip(found, IN_THE_MIDDLE, strict=True):
            assert message in text
            assert seconds < 60  # half of the group's timeout


@pytest.mark.parametrize("part", ["mask", "cache"])
@pytest.mark.parametrize(
    "wrong", [{"x": torch.ones(1, 1, 15)}, {"unknown": 1}], ids=["a width", "an argument"]
)
def test_a_layer_without_ranks_tells_those_of_its_part_of_wrong_inputs(part, wrong):
    def work(sp):
        layer, tables = nn.BurstAttention(16, 2), nn.rope_tables(torch.zeros(1), 8)
        given = {"x": torch.ones(1, 1, 16), "cos": tables[0], "sin": tables[1]}
        given[part] = sp.sequence(Mask.causal(2)) if part == "mask" else Cache(sp, 1, 10)
        expected = (TypeError, ValueError) if sp.rank else RanksDisagree
        reason = next(iter(wrong)) if sp.rank else "rank 1 of the group failed"
        with pytest.raises(expected, match=reason):
            layer(**given | (wrong if sp.rank else {}))
        return layer(**given).isfinite().all()

    with torch.no_grad():
        assert all(on_ranks(2, work))


@pytest.mark.parametrize("kind", [find_kind(None, {})[0], Lightning((0.1, 0.2))])
def test_layers_in_another_order_are_found_with_the_next_token(kind):
    def work(sp):
        cache, x = Cache(sp, 3, 10), torch.ones(3, 1, 1, 2, 8)
        for order in ((0, 1, 2), (0, 2, 1) if sp.rank else (0, 1, 2)):
            for layer in order:
                cache.mix(layer, kind, *x)
        cache.crop(2)
        with pytest.raises(ValueError, match="ranks differ in order of layers in the tokens befo"):
            cache.mix(0, kind, *x)

    on_ranks(2, work)
