"""Ranks as threads of this process, and the backward of their results.

    outputs = simulate(3, lambda ring: work(ring.rank, process_group=ring))

Autograd walks a graph on one thread, but each rank's attention waits in its backward for the other
ranks. So one autograd function of all ranks stands between their graphs and the results. Its
backward walks each rank's graph on a separate thread, and adds up the gradients of shared leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..base.arguments import as_int
from ..base.autograd import check_first_derivative, check_transforms
from ..errors import RankFailed
from ..transport.simulator import Network, SimulatedRing

Result = TypeVar("Result")


def simulate(size: int, work: Callable[[SimulatedRing], Result]) -> list[Result]:
    """Run `work(ring)` on `size` ranks at once. Return their results in rank order, or raise the
    first failure.

    The caller's grad mode, inference mode and autocast hold on the ranks. Tensors in the results
    (also in lists, tuples, dicts and dataclasses) are differentiable once, in leaves. All ranks
    take part in the backward, with gradients of 0 where a rank's results are not used.
    Checkpointing inside `work` needs use_reentrant=False, unless `work` calls backward itself.

    For shared tensors that are no leaves, torch.autograd.grad raises, and hooks run on each rank.

    Raises:

    - TypeError for a size that is no whole number or work that cannot be called
    - ValueError for a size below 1
    - RuntimeError inside the transforms of torch.func, inside torch.autograd.functional with
      create_graph (as its hessian), and for results with tangents of forward mode
    - RuntimeError in the backward with create_graph, and for leaves with tensor hooks
    """
    size = as_int("size", size)
    if size < 1:
        raise ValueError(f"size: expected at least one rank, got {size}")
    if not callable(work):
        raise TypeError(f"work: expected a function of a ring, got {type(work).__name__}")
    check_transforms("simulate")
    network, threads = Network(), tuple(range(size))
    rings = [SimulatedRing(network, threads, rank) for rank in threads]
    results = _run(network, [functools.partial(work, ring) for ring in rings])
    return _differentiable(network, results)


def _run(network: Network, works: Sequence[Callable[[], Any] | None]) -> list[Any]:
    """Run each rank's work, if any, on a thread. Return the results, or raise the first failure."""
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []
    modes = _read_modes()
    network.ended = {rank for rank, work in enumerate(works) if work is None}

    def run(rank: int, work: Callable[[], Any]) -> None:
        try:
            with modes():
                results[rank] = work()
        except BaseException as failure:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(failure)
            network.failed.set()
        network.ended.add(rank)

    active = [(rank, work) for rank, work in enumerate(works) if work is not None]
    threads = [threading.Thread(target=run, args=arguments, daemon=True) for arguments in active]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, RankFailed)), failures[0])
    return results


def _read_modes() -> Callable[[], AbstractContextManager[None]]:
    """Return a context with this thread's grad mode, inference mode and autocast, for another."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    casts = [(device, torch.get_autocast_dtype(device)) for device in devices]

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), ExitStack() as stack:
            for cast in casts:
                stack.enter_context(torch.autocast(*cast))
            yield

    return modes


class _Graph(NamedTuple):
    """A rank's results that have a gradient, and the leaves that they depend on."""

    outputs: list[Tensor]
    leaves: list[Tensor]

    def differentiate(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the leaves' gradients, from the outputs' gradients."""
        try:
            return torch.autograd.grad(
                self.outputs, self.leaves, grads, allow_unused=True, retain_graph=True
            )
        except RuntimeError as error:
            if "torch.utils.checkpoint is incompatible with .grad()" not in str(error):
                raise
            raise RuntimeError(
                "simulate differentiates each rank with torch.autograd.grad, which reentrant "
                "checkpointing does not support: call torch.utils.checkpoint.checkpoint with "
                "use_reentrant=False inside simulate"
            ) from error


class _AllRanks(torch.autograd.Function):
    """The function from the leaves of all ranks to their outputs."""

    @staticmethod
    def forward(
        ctx: Any, network: Network, graphs: list[_Graph], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.network, ctx.graphs, ctx.leaves = network, graphs, leaves
        return tuple(x.detach() for graph in graphs for x in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("the result of simulate")
        _check_hooks(ctx.leaves)
        if ctx.network.failed.is_set():
            raise RuntimeError("a backward of these ranks failed earlier: run simulate again")
        left = iter(grads)
        shares = [[next(left) for _ in graph.outputs] for graph in ctx.graphs]
        pairs = zip(ctx.graphs, shares, strict=True)
        works = [functools.partial(g.differentiate, share) if share else None for g, share in pairs]
        totals: dict[int, Tensor] = {}
        for graph, found in zip(ctx.graphs, _run(ctx.network, works), strict=True):
            for leaf, grad in zip(graph.leaves, found or (), strict=True):
                if grad is not None:
                    totals[id(leaf)] = totals[id(leaf)] + grad if id(leaf) in totals else grad
        return None, None, *(totals.get(id(leaf)) for leaf in ctx.leaves)


def _differentiable(network: Network, results: list[Any]) -> list[Any]:
    """Return the results with tensors that can be differentiated from one thread."""
    graphs = [_find_graph(result) for result in results]
    leaves = {id(leaf): leaf for graph in graphs for leaf in graph.leaves}
    if not leaves:
        return results
    _check_functional()
    with torch.inference_mode(False), torch.enable_grad():
        joined = _AllRanks.apply(network, graphs, *leaves.values())
    ids = [id(x) for graph in graphs for x in graph.outputs]
    by_id = dict(zip(ids, joined, strict=True))
    replaced: list[Any] = _map_tensors(lambda x: by_id.get(id(x), x), results)
    return replaced


def _find_graph(result: Any) -> _Graph:
    found: dict[int, Tensor] = {}  # by id
    _map_tensors(lambda x: found.setdefault(id(x), x), result)
    outputs = [x for x in found.values() if x.grad_fn is not None]
    check_transforms("simulate", *outputs)
    return _Graph(outputs, _find_leaves(outputs))


def _find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that need a gradient and that the outputs depend on."""
    left: list[Any] = [x.grad_fn for x in outputs]
    seen, leaves = set(), []
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves


def _check_functional() -> None:
    """Raise RuntimeError inside a function of torch.autograd.functional with create_graph.

    It differentiates with respect to a view of its leaf input. The graph here begins at leaves, so
    it would return zeros. Only the call stack shows it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        is_functional = frame.f_code.co_filename == torch.autograd.functional.__file__
        if is_functional and frame.f_locals.get("create_graph"):
            raise RuntimeError(
                "the result of simulate is differentiable once: expected torch.autograd.functional "
                f"without create_graph, got {frame.f_code.co_name} with it"
            )
        frame = frame.f_back


def _check_hooks(leaves: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a leaf has a tensor hook, which autograd would run on each rank."""
    for leaf in leaves:
        if leaf._backward_hooks:
            raise RuntimeError(
                "the backward of simulate expected leaves without tensor hooks, which would run "
                f"more than once, got one of shape {tuple(leaf.shape)} with "
                f"{len(leaf._backward_hooks)}: remove them, or use "
                "register_post_accumulate_grad_hook"
            )


def _map_tensors(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Return `result` with function(x) for each tensor x, also in containers and dataclasses."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        changed = copy.copy(x)
        for part in dataclasses.fields(x):
            # it may be frozen
            object.__setattr__(changed, part.name, _map_tensors(function, getattr(x, part.name)))
        return changed

    return pytree.tree_map(one, result)
