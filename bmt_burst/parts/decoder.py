"""Steps of decoding: a model computes one new token of each row, as a CUDA graph where possible.

A step launches hundreds of small kernels, for which the host needs longer than the GPU. A graph
launches all of them at once.

    decoder = Decoder(model, cache)  # after the prefill of a bmt_burst.Cache
    logits = decoder(tokens)         # on all ranks, for each new token

One graph serves all lengths up to the cache's limit. The host writes the position, the places of
new keys, and the spans of keys that the token sees to the GPU's memory. Kernels read them there.

Letters: B batch, S new tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..base.arguments import as_bool
from ..base.compiled import not_compiled
from ..memories.new_tokens import NewTokens
from ..ranks.agreement import Terms, refuse, run_agreed, run_together
from ..ranks.rings import Rings
from ..transport.torch_dist import TorchTransport
from .cache import Cache

logger = logging.getLogger("bmt_burst")


class Decoder:
    """A model on new tokens after those of a cache. All ranks of the cache call it together.

    model  a function model(tokens, positions, cache=cache) of (B, S) and (S,) int64, as CPM is. It
           returns logits (B, S, V).
    cache  a Cache after its prefill
    graph  True: replay a CUDA graph, or raise ValueError where there is an obstacle. False: never.
           None: replay one unless there is an obstacle, which is logged.

    A graph computes one new token for each row. The first such token is computed without it, as
    other numbers of tokens are: kernels are compiled and ranks connected before a graph is made.

    Obstacles are CPUs, fp64, GPUs for which kernels/triton_few_queries.py has no kernel, layers on
    several GPUs, and ranks that are no single group of torch.distributed. Where layers turn sparse,
    at `dense_len` tokens, the next token is computed without a graph, and then a new one is made.

    The model must do the same work for each token. Its work on the host is done only when the graph
    is made. Its weights may change in place only. Close the Decoder before the ranks' group is
    destroyed, or use it as a context: NCCL waits until graphs that use it are gone.

    Raises TypeError for a graph that is no bool.
    """

    def __init__(self, model: Callable[..., Tensor], cache: Cache, graph: bool | None = None):
        self.model, self.cache = model, cache
        self._graph_asked = None if graph is None else as_bool("graph", graph)
        # what the last token needed that was computed without a graph, if it was a single one
        self._numbers: list[tuple[Hashable, ...]] | None = None
        self._step: _Step | None = None
        self._variant = cache.variant(cache.length + 1)

    def close(self) -> None:
        """Drop the graph. A later call makes another one."""
        self._step = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @not_compiled
    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of new tokens (B, S) int64, without gradient.

        Raises ValueError on all ranks for other tokens, and if the cache is full, in a prefill, or
        has other rows. Raises RuntimeError if no graph can be made, RanksDisagree on other ranks.
        """
        rings = self.cache.sp.rings
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens.dim() != 2 or tokens.dtype != torch.int64:
            got = f"{tuple(tokens.shape)} {tokens.dtype}" if is_tensor else type(tokens).__name__
            error = ValueError(f"expected tokens (batch, tokens) torch.int64, got {got}")
            refuse(rings, "a call of a Decoder", error)
        count = tokens.shape[1]
        if self._variant != (variant := self.cache.variant(self.cache.length + 1)):
            # layers that turned sparse have other kernels, which run without a graph first
            self._numbers = self._step = None
            self._variant = variant
        if count == 1 and self._numbers is not None and self._replays(rings):
            return self._replay(rings, tokens, self._numbers)
        length = self.cache.length
        positions = torch.arange(length, length + count, device=tokens.device)
        logits = self.model(tokens, positions, cache=self.cache)
        if count == 1:
            assert self.cache._new is not None, "the model has begun them"
            self._numbers = [*self.cache._new.sent]
        return logits

    def _replays(self, rings: Rings) -> bool:
        """Return whether a graph computes the step. If it was asked for, raise for an obstacle."""
        if self._step is not None or self._graph_asked is False:
            return self._step is not None
        obstacle = self._find_obstacle(rings)
        if obstacle is not None and self._graph_asked:
            error = ValueError(f"expected graph=False or graph=None, got graph=True: {obstacle}")
            refuse(rings, "a call of a Decoder", error)
        if obstacle is not None:
            logger.info("decoding without a CUDA graph: %s", obstacle)
            self._graph_asked = False
        return obstacle is None

    def _find_obstacle(self, rings: Rings) -> str | None:
        """Return why a graph cannot compute a step, or None if it can."""
        memories = self.cache._memories.values()
        if reason := next(filter(None, (memory.graph_obstacle() for memory in memories)), None):
            return reason
        if len({memory.difference.device for memory in memories}) > 1:
            return "the layers are on several GPUs"
        if rings.double or not all(isinstance(ring, TorchTransport) for ring in rings.shared):
            return "the ranks are no single group of torch.distributed"
        return None

    def _replay(
        self, rings: Rings, tokens: Tensor, numbers: Sequence[tuple[Hashable, ...]]
    ) -> Tensor:
        """Compute one token by the graph. The first call makes it."""
        doing, cache = "a step of a Decoder", self.cache
        memory = next(iter(cache._memories.values()))

        def check() -> tuple[Terms, None]:
            cache._check_ready(1)
            if tokens.shape != (memory.rows, 1):
                raise ValueError(f"expected tokens ({memory.rows}, 1), got {tuple(tokens.shape)}")
            return Terms(doing, cache._terms, of=" of a Decoder"), None

        def run(*_: Any) -> Tensor:
            new = cache._begin(rings, 1)
            if self._step is None:
                for ring in rings.shared:
                    assert isinstance(ring, TorchTransport), "others are obstacles"
                    ring.start_watch()
                record = functools.partial(_Step, self.model, cache, new, numbers)
                try:
                    self._step = run_together(rings, "the making of a Decoder's graph", record)
                except BaseException:
                    cache._take_back(new.start)  # nothing was computed
                    raise
            self._step.fill(tokens, new)
            self._step.graph.replay()
            new.differs = self._step.differs
            cache._done = [*self._step.order]
            return self._step.logits.clone()

        with torch.cuda.device_of(memory.difference):
            return run_agreed(rings, doing, check, run)


class _Step:
    """A recorded step, and the memory on the GPU that it reads and writes.

    names    of the numbers that layers read, as NewTokens.on takes them
    tokens   (B, 1) int64
    numbers  int64: the numbers with these names, one after the other
    logits   (B, 1, V)
    differs  whether ranks were given other tokens, () bool, or None if they do not compare them
    order    of its layers
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        cache: Cache,
        new: NewTokens,
        names: Sequence[tuple[Hashable, ...]],
    ):
        """Record the tokens that the cache has begun, without computing them."""
        memory = next(iter(cache._memories.values()))
        device = memory.difference.device
        self.tokens = torch.zeros(memory.rows, 1, dtype=torch.int64, device=device)
        self.names = [("first",), *(name for name in names if name != ("first",))]
        shapes = [torch.tensor(new.find(*name)).shape for name in self.names]
        sizes = [shape.numel() for shape in shapes]
        self.numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        for name, x, shape in zip(self.names, self.numbers.split(sizes), shapes, strict=True):
            new.sent[name] = x.view(shape)
        self.graph = torch.cuda.CUDAGraph()
        try:
            # other threads, as those that watch ranks, need not stop meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.logits = model(self.tokens, new.sent["first",], cache=cache)
        except RuntimeError as error:
            raise RuntimeError(
                f"no CUDA graph can be made of this model, pass graph=False to Decoder: {error}"
            ) from error
        self.differs, self.order = new.differs, [*cache._done]

    def fill(self, tokens: Tensor, new: NewTokens) -> None:
        """Write the inputs of the tokens that the cache has begun."""
        found = [torch.tensor(new.find(*name)).flatten() for name in self.names]
        self.tokens.copy_(tokens)
        self.numbers.copy_(torch.cat(found))
