"""Steps of decoding: a model computes one new token of each row, as a CUDA graph where possible.

A step launches hundreds of small kernels. The host needs longer to launch them one by one than a
GPU to compute them. A graph launches all of them at once.

    decoder = Decoder(model, cache)  # after the prefill of a bmt_burst.Cache
    logits = decoder(tokens)         # on all ranks, for each new token

One graph serves all lengths up to the cache's limit. The host writes the position, the places of
new keys, and the spans of keys that the token sees to the GPU's memory. Kernels read them there.

Letters: B batch, S new tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import as_bool
from ..base.compiled import not_compiled
from ..calls.refusal import refuse_call
from ..kernels import few_queries
from ..ranks.agreement import admit_one_thread, agree, report_failure, run_together
from ..ranks.rings import Rings, make_rings
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

    Obstacles are CPUs, fp64 and GPUs for which kernels/triton_few_queries.py has no kernel; and
    ranks that are no single group of torch.distributed.

    Where layers turn sparse, at `dense_len` tokens, the next token is computed without a graph, and
    then a new one is made.

    The model must do the same work for each token. Its work on the host is done only when the graph
    is made. Its weights may change in place only. Drop the Decoder before the ranks' group is
    destroyed: NCCL waits until graphs that use it are gone.

    Raises TypeError for a graph that is no bool.
    """

    def __init__(self, model: Callable[..., Tensor], cache: Cache, graph: bool | None = None):
        self.model, self.cache = model, cache
        self._graph_asked = None if graph is None else as_bool("graph", graph)
        # those of the layers, once one token was computed without a graph
        self._windows: list[int | None] | None = None
        self._step: _Step | None = None
        self._sparse_lens = self._find_sparse_lens()

    def _find_sparse_lens(self) -> set[int]:
        """Return each `dense_len` with which the next token's attention is sparse."""
        return {least for least in self.cache._dense_lens if self.cache.length + 1 >= least}

    @not_compiled
    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of new tokens (B, S) int64, without gradient.

        Raises ValueError on all ranks if tokens are not (B, S) int64, and if the cache is full, in
        a prefill, or has other rows.
        Raises RuntimeError if no graph can be made of the model, RanksDisagree on other ranks.
        """
        sp = self.cache.sp
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens.dim() != 2 or tokens.dtype != torch.int64:
            got = f"{tuple(tokens.shape)} {tokens.dtype}" if is_tensor else type(tokens).__name__
            error = ValueError(f"expected tokens (batch, tokens) torch.int64, got {got}")
            refuse_call(error, sp.process_group, sp.double_group, "a call of a Decoder")
        count = tokens.shape[1]
        rings = make_rings(sp.process_group, sp.double_group)
        if self._sparse_lens != (sparse_lens := self._find_sparse_lens()):
            # layers that turned sparse have other kernels, which run without a graph first
            self._windows = self._step = None
            self._sparse_lens = sparse_lens
        if count == 1 and self._windows is not None and self._replays(rings):
            return self._replay(rings, tokens, self._windows)
        length = self.cache.length
        positions = torch.arange(length, length + count, device=tokens.device)
        logits = self.model(tokens, positions, cache=self.cache)
        if count == 1:
            self._windows = [*self.cache._new.spans]
        return logits

    def _replays(self, rings: Rings) -> bool:
        """Return whether a graph computes the step. Raises ValueError for an obstacle to one that
        was asked for.
        """
        if self._step is not None or self._graph_asked is False:
            return self._step is not None
        obstacle = self._find_obstacle(rings)
        if obstacle is not None and self._graph_asked:
            raise ValueError(f"expected graph=False or graph=None, got graph=True: {obstacle}")
        if obstacle is not None:
            logger.info("decoding without a CUDA graph: %s", obstacle)
            self._graph_asked = False
        return obstacle is None

    def _find_obstacle(self, rings: Rings) -> str | None:
        """Return why a graph cannot compute a step, or None if it can."""
        keys = [kept.k for kept in self.cache._kept.values()]
        if any(few_queries.find_kernels(k) is few_queries for k in keys):
            return f"keys are {keys[0].dtype} on {keys[0].device}, for which there is no kernel"
        if len({k.device for k in keys}) > 1:
            return "the layers are on several GPUs"
        if rings.double or not all(isinstance(ring, TorchTransport) for ring in rings.shared):
            return "the ranks are no single group of torch.distributed"
        return None

    def _replay(self, rings: Rings, tokens: Tensor, windows: list[int | None]) -> Tensor:
        """Compute one token by the graph. The first call makes it."""
        doing, cache = "a step of a Decoder", self.cache
        keys = next(iter(cache._kept.values())).k

        def describe() -> dict[str, Any]:
            cache._check_ready(1)
            if tokens.shape != (len(keys), 1):
                raise ValueError(f"expected tokens ({len(keys)}, 1), got {tuple(tokens.shape)}")
            return {"length": cache.length, "limit": cache.limit}

        with torch.cuda.device_of(keys), admit_one_thread(rings, doing):
            agree(rings, "a Decoder", describe)
            cache._begin(1)
            if self._step is None:
                for ring in rings.shared:
                    assert isinstance(ring, TorchTransport), "others are obstacles"
                    ring.start_watch()
                record = functools.partial(_Step.record, self.model, cache, windows)
                self._step = run_together(rings, "the making of a Decoder's graph", record)
            with report_failure(rings, doing):
                self._step.fill(tokens, cache)
                self._step.graph.replay()
                cache._lengths = [cache.length] * cache.layers
                return self._step.logits.clone()


@dataclass
class _Step:
    """A recorded step, and the memory on the GPU that it reads and writes.

    tokens   (B, 1) int64
    numbers  int64: the position, the place of its key, and for each window the first key that the
             token sees and the key after its last one
    logits   (B, 1, V)
    """

    graph: torch.cuda.CUDAGraph
    windows: list[int | None]
    tokens: Tensor
    numbers: Tensor
    logits: Tensor

    @staticmethod
    def record(model: Callable[..., Tensor], cache: Cache, windows: list[int | None]) -> _Step:
        """Record the tokens that the cache has begun, without computing them."""
        keys, new = next(iter(cache._kept.values())).k, cache._new
        tokens = torch.zeros(len(keys), 1, dtype=torch.int64, device=keys.device)
        numbers = torch.zeros(2 + 2 * len(windows), dtype=torch.int64, device=keys.device)
        new.first, new.on_device = numbers[:1], numbers[1:2]
        new.spans = dict(zip(windows, numbers[2:].view(-1, 1, 2), strict=True))
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, as those that watch ranks, need not stop meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = model(tokens, numbers[:1], cache=cache)
        except RuntimeError as error:
            raise RuntimeError(
                f"no CUDA graph can be made of this model, pass graph=False to Decoder: {error}"
            ) from error
        return _Step(graph, windows, tokens, numbers, logits)

    def fill(self, tokens: Tensor, cache: Cache) -> None:
        """Write the inputs of the tokens that the cache has begun."""
        new = cache._new
        spans = [end for window in self.windows for end in cache._find_spans(window)[0]]
        self.tokens.copy_(tokens)
        self.numbers.copy_(torch.tensor([new.start, *new.places, *spans]))
