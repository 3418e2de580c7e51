"""Steps of a Decoder: those of a graph have the logits of those without one.

CPUs have no graphs. Here a stand-in runs the model again at each replay, and reads what a graph
would read: the memory that was there when it was made. tests/test_gpu_chunks.py has real graphs.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from bmt_burst import Cache, Decoder, SequenceParallel, init_sequence_parallel
from tests.launcher import run_ranks
from tests.test_cache import WINDOWED
from tests.test_chunks import DENSE, LARGEST, SCALED, SPARSE, build, on_ranks

LIMIT = 133  # beyond two blocks of 64
TOKENS = torch.randint(0, 40, (2, LIMIT), generator=torch.Generator().manual_seed(5))


def fill(model, cache: Cache, prompt: int) -> None:
    positions = torch.arange(prompt)
    for part in cache.prefill(prompt, 30):
        model(part.shard(TOKENS[:, :prompt]), part.shard(positions, 0), cache=part)


def decode(
    model, cache: Cache, graph: bool | None = None, prompt: int = 60, end: int = LIMIT
) -> torch.Tensor:
    """Return the logits of the tokens from the prompt to the end, most of them one by one."""
    with torch.no_grad():
        fill(model, cache, prompt)
    decoder, found = Decoder(model, cache, graph), []
    while cache.length < end:
        count = 3 if cache.length == prompt + 5 else 1  # as a user's next question
        found.append(decoder(TOKENS[:, cache.length : cache.length + count]))
    return torch.cat(found, 1)


class StandIn:
    """A graph of a model and cache. `record` stands in for torch.cuda.graph."""

    def __init__(self, model, cache: Cache):
        self.model, self.cache, self.replays = model, cache, 0

    def __call__(self, *inputs, cache):
        """Be the model. When it is recorded, note the memory that it reads and writes."""
        logits = self.model(*inputs, cache=cache)
        if self.replays == -1:
            self.inputs, self.logits = inputs, logits
            self.read = cache._new.sent
        return logits

    @contextmanager
    def record(self, graph, capture_error_mode):
        """Undo what a recording would not do."""
        assert graph is self and capture_error_mode == "thread_local"
        before = [x.clone() for x in self.written()]
        self.replays = -1
        yield
        self.replays = 0
        for x, old in zip(self.written(), before, strict=True):
            x.copy_(old)

    def written(self) -> list[torch.Tensor]:
        """Return the memory that a step writes."""
        memories = self.cache._memories.values()
        keys = [x for memory in memories for x in memory.kept]
        decoding = [d for memory in memories if (d := getattr(memory, "_decoding", None))]
        return keys + [x for keys in decoding for x in (keys._recent, *keys._keys)]

    def replay(self):
        self.replays += 1
        new, cache = self.cache._new, self.cache
        new.sent = self.read
        new.prepared = {}
        cache._done = []
        self.logits.copy_(self.model(*self.inputs, cache=cache))


@contextmanager
def stand_in(model, cache):
    """Let decoders of this model and cache make a stand-in of a graph."""
    graph = StandIn(model, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        patch.setattr(torch.cuda, "graph", graph.record)
        event = SimpleNamespace(record=lambda: None, query=lambda: True)
        patch.setattr(torch.cuda, "Event", lambda: event)  # for the watch
        patch.setattr(Decoder, "_find_obstacle", lambda *_: None)
        yield graph


def decode_twice(config, sp, prompt: int) -> bool:
    """Whether a stand-in of a graph, which is replayed, has the logits of steps without one."""
    model = build(config, sp)
    plain = decode(model, Cache(sp, config.num_layers, LIMIT), graph=False, prompt=prompt)
    cache = Cache(sp, config.num_layers, LIMIT)
    with stand_in(model, cache) as graph:
        replayed = decode(graph, cache, prompt=prompt)
    return bool(replayed.equal(plain)) and graph.replays == LIMIT - prompt - 3 - 1


def test_a_graph_has_the_logits_of_steps_without_one():
    """With rotary frequencies that change at 64 tokens, and windows."""
    assert decode_twice(SCALED, SequenceParallel(), 60)


def decode_on_a_rank(rank: int) -> bool:
    torch.set_num_threads(1)
    return decode_twice(WINDOWED, init_sequence_parallel(), 110)


def test_a_graph_on_ranks():
    assert all(run_ranks(2, decode_on_a_rank))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_where_no_graph_is_possible_steps_are_computed_without_one(config, size, caplog):
    caplog.set_level(logging.INFO, "bmt_burst")

    def work(sp):
        return decode(build(config, sp), Cache(sp, config.num_layers, LIMIT), **steps)

    steps = {"prompt": 84, "end": 94}  # layers turn sparse at 90
    plain = decode(build(config), Cache(None, config.num_layers, LIMIT), graph=False, **steps)
    for logits in on_ranks(size, work):
        assert (logits - plain).abs().max() / plain.abs().max() < LARGEST
    reason = "decoding without a CUDA graph: keys are torch.float64 on cpu, for which there is no k"
    assert caplog.text.count(reason) == size


def test_a_graph_that_was_asked_for_is_made_or_refused():
    message = "expected graph=False or graph=None, got graph=True: keys are torch.float64 on cpu"
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(build(DENSE), Cache(None, 3, LIMIT), graph=True)
    with pytest.raises(TypeError, match="graph must be True or False"):
        Decoder(build(DENSE), Cache(None, 3, LIMIT), graph="yes")


def test_wrong_tokens_are_refused_before_a_replay():
    model, cache = build(DENSE), Cache(None, 3, 63)
    with torch.no_grad():
        fill(model, cache, 60)
    with stand_in(model, cache) as graph:
        decoder = Decoder(graph, cache)
        decoder(TOKENS[:, 60:61])
        decoder(TOKENS[:, 61:62])
        with pytest.raises(ValueError, match=r"expected tokens \(2, 1\), got \(1, 1\)"):
            decoder(TOKENS[:1, 62:63])
        decoder(TOKENS[:, 62:63])
        with pytest.raises(ValueError, match="the cache is full: it has a limit of 63 tokens"):
            decoder(TOKENS[:, 63:64])
    assert graph.replays == 2


@pytest.mark.parametrize(
    ("wrong", "got"),
    [(TOKENS[0, 60:61], r"\(1,\) torch.int64"), (TOKENS[:, 60:61] > 0, r"\(2, 1\) torch.bool")],
)
def test_wrong_tokens_on_one_rank_are_refused_on_all(wrong, got):
    def work(sp):
        model, cache = build(DENSE, sp), Cache(sp, 3, LIMIT)
        with torch.no_grad():
            fill(model, cache, 60)
        decoder = Decoder(model, cache)
        message = rf"expected tokens \(batch, tokens\) torch.int64, got {got}"
        with pytest.raises(ValueError, match=message):
            decoder(wrong if sp.rank else TOKENS[:, 60:61])
        return decoder(TOKENS[:, 60:61]).shape

    assert on_ranks(2, work) == [(2, 1, 40)] * 2


def test_a_model_that_no_graph_can_hold_is_reported():
    model, cache = build(DENSE), Cache(None, 3, LIMIT)
    with torch.no_grad():
        fill(model, cache, 60)

    def reads_the_gpu(*inputs, cache):
        if graph.replays == -1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return model(*inputs, cache=cache)

    with stand_in(model, cache) as graph:
        decoder = Decoder(reads_the_gpu, cache)
        decoder(TOKENS[:, 60:61])
        with pytest.raises(RuntimeError, match=r"pass graph=False to Decoder: operation not perm"):
            decoder(TOKENS[:, 61:62])
    tokens = TOKENS[:, cache.length : LIMIT]
    positions = torch.arange(cache.length, LIMIT)
    assert model(tokens, positions, cache=cache).shape[1] == LIMIT - 61  # nothing was added


def test_rows_of_a_cache_that_a_decoder_filled_are_chosen():
    """A Decoder runs in inference mode, whose tensors change only in it."""
    model, cache = build(WINDOWED), Cache(None, 3, LIMIT)
    decoder = Decoder(model, cache)
    whole = decoder(TOKENS[:, :20])
    cache.select_rows([1, 0])
    cache.crop(10)
    assert decoder(TOKENS[[1, 0], 10:20]).allclose(whole[[1, 0], 10:])
