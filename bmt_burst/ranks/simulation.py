"""Ranks that are threads of this process: what they run, and the backward of what they return.

    outputs = simulate(3, lambda ring: work(ring.rank, process_group=ring))

Autograd walks a graph on one thread, but each rank's attention waits in its backward for that of
the others. So what the ranks return is cut off from their graphs, and one function of all of them
stands between: its backward lets every rank walk its own graph on a thread of its own, and adds up
what they find for the leaves that they share.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..base.arguments import as_int
from ..base.autograd import check_first_derivative, check_transforms
from ..transport.simulator import Aborted, Network, SimulatedRing

Result = TypeVar("Result")


def simulate(size: int, work: Callable[[SimulatedRing], Result]) -> list[Result]:
    """Runs `work(ring)` on `size` ranks at once; returns their results in rank order, or raises the
    first failure.

    The caller's grad mode, inference mode and autocast hold on the ranks. Tensors in the results
    (also in lists, tuples, dicts and dataclasses) are differentiable (once) in the leaves that they
    come from, of any rank: all ranks take part in the backward, those whose results have no part in
    it with gradients of 0. Checkpointing inside `work` needs use_reentrant=False, unless `work`
    calls backward itself.

    Raises TypeError for a size that is no whole number or work that cannot be called, ValueError
    for a size below 1. Raises RuntimeError inside the transforms of torch.func, and for results
    with tangents of forward mode. The backward raises RuntimeError with create_graph, and for
    leaves with tensor hooks. A hook of any other tensor that ranks share runs on each rank, with
    that rank's share of the gradient. Such a tensor is no input of the
    results: torch.autograd.grad raises for it, and torch.autograd.functional takes its gradient for
    zero unless called with strict=True.
    """
    size = as_int("size", size)
    if size < 1:
        raise ValueError(f"simulate needs at least one rank, got size={size}")
    if not callable(work):
        raise TypeError(f"work must be a function of a ring, got {type(work).__name__}")
    check_transforms("simulate")
    network, threads = Network(), tuple(range(size))
    rings = [SimulatedRing(network, threads, rank) for rank in threads]
    return _differentiable(
        network, _run(network, [functools.partial(work, ring) for ring in rings])
    )


def _run(network: Network, works: Sequence[Callable[[], Any] | None]) -> list[Any]:
    """The results of the ranks' works, each on a thread; None of a rank without work, which the
    others may not await.

    Raises the first failure.
    """
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []
    modes = _modes_of_this_thread()
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
        raise next((f for f in failures if not isinstance(f, Aborted)), failures[0])
    return results


def _modes_of_this_thread() -> Callable[[], AbstractContextManager]:
    """A context in which another thread has the grad mode, inference mode and autocast of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = {
        x: torch.get_autocast_dtype(x) for x in ("cpu", "cuda") if torch.is_autocast_enabled(x)
    }

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), ExitStack() as stack:
            for device_type, dtype in casts.items():
                stack.enter_context(torch.autocast(device_type, dtype))
            yield

    return modes


@dataclass(frozen=True)
class _Graph:
    """What a rank returned that has a gradient, and the leaves that it comes from."""

    outputs: list[Tensor]
    leaves: list[Tensor]

    def differentiate(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The leaves' gradients, given those of the outputs."""
        try:
            return torch.autograd.grad(
                self.outputs, self.leaves, grads, allow_unused=True, retain_graph=True
            )
        except RuntimeError as error:
            if "torch.utils.checkpoint is incompatible with .grad()" not in str(error):
                raise
            raise RuntimeError(
                "simulate differentiates each rank with torch.autograd.grad, which reentrant checkpointing does not "
                "know: call torch.utils.checkpoint.checkpoint with use_reentrant=False inside simulate"
            ) from error


class _AllRanks(torch.autograd.Function):
    """From the leaves of all ranks to their outputs."""

    @staticmethod
    def forward(ctx, network: Network, graphs: list[_Graph], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.network, ctx.graphs, ctx.leaves = network, graphs, leaves
        return tuple(x.detach() for graph in graphs for x in graph.outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        check_first_derivative("what simulate returns")
        _check_hooks(ctx.leaves)
        if ctx.network.failed.is_set():
            raise RuntimeError(
                "a backward of these simulated ranks failed before: run simulate again"
            )
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
    """The results, with tensors in them that can be differentiated from one thread."""
    outputs: list[dict[int, Tensor]] = [{} for _ in results]
    for own, result in zip(outputs, results, strict=True):
        _mapped(lambda x, own=own: own.setdefault(id(x), x) if x.grad_fn is not None else x, result)
        check_transforms("simulate", *own.values())
    graphs = [_Graph(list(own.values()), _leaves(own.values())) for own in outputs]
    leaves = {id(leaf): leaf for graph in graphs for leaf in graph.leaves}
    if not leaves:
        return results
    with torch.inference_mode(False), torch.enable_grad():
        joined = iter(_AllRanks.apply(network, graphs, *leaves.values()))
    ours = [{name: next(joined) for name in own} for own in outputs]
    return [
        _mapped(lambda x, own=own: own.get(id(x), x), r)
        for own, r in zip(ours, results, strict=True)
    ]


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without a history that the outputs come from and that want a gradient."""
    left, seen, leaves = [x.grad_fn for x in outputs], set(), []
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves


def _check_hooks(leaves: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a leaf has a tensor hook.

    Autograd runs such hooks wherever the leaf's gradient is found: on each rank, and for the sum
    over ranks again.
    """
    for leaf in leaves:
        if leaf._backward_hooks:
            raise RuntimeError(
                "the backward of simulate expected leaves without tensor hooks, which would run more than once, got "
                f"one of shape {tuple(leaf.shape)} with {len(leaf._backward_hooks)}: remove them, or take "
                "register_post_accumulate_grad_hook"
            )


def _mapped(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """`result` with function(x) for each tensor x in its lists, tuples, dicts and dataclasses."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        changed = copy.copy(x)
        for part in dataclasses.fields(x):
            # it may be frozen
            object.__setattr__(changed, part.name, _mapped(function, getattr(x, part.name)))
        return changed

    return pytree.tree_map(one, result)
