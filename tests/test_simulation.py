"""Simulated ranks: the backward of what they return, the caller's modes, failures."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_burst import burst_attn_func, shard, simulate, unshard
from bmt_burst.errors import RankFailed
from bmt_burst.strategies.ring import execution
from bmt_burst.transport import Put
from tests.cases import random_qkv
from tests.reference import relative_error
from tests.refusals import refusal
from tests.rings import ring_arguments

RANKS = 3


def attention(ring, q, k, v, **options):
    q, k, v = (shard(x, ring.rank, ring.size) for x in (q, k, v))
    return burst_attn_func(
        q, k, v, causal=True, **ring_arguments(ring, options.pop("inner", ring.size)), **options
    )


def inputs():
    q, k, v, dout = random_qkv(2, 23, 4, 2, 8)
    return [x.requires_grad_() for x in (q, k, v)], dout


def expected():
    tensors, dout = inputs()
    return torch.autograd.grad(burst_attn_func(*tensors, causal=True), tensors, dout)


def assert_equal(grads, others=None):
    for mine, other in zip(grads, others or expected(), strict=True):
        assert relative_error(mine, other) < 1e-12


@pytest.mark.parametrize(
    ("size", "inner", "backward"),
    [(1, 1, "q"), (2, 2, "kv"), (4, 4, "q"), (4, 4, "kv"), (4, 2, "auto")],
)
def test_what_ranks_return_is_differentiable_and_twice_over(size, inner, backward):
    tensors, dout = inputs()
    options = {"inner": inner, "backward": backward}
    out = unshard(simulate(size, lambda ring: attention(ring, *tensors, **options)))
    for _ in range(2):
        assert_equal(torch.autograd.grad(out, tensors, dout, retain_graph=True))
    assert_equal(torch.autograd.grad(out, tensors[0], dout), expected()[:1])


@dataclass(frozen=True)
class Result:
    loss: Tensor
    rest: dict


def test_ranks_share_parameters_and_return_what_they_like():
    """Two layers; a loss and the attention's lse, nested; every rank's loss counts."""
    layer = nn.Linear(32, 32, dtype=torch.float64)
    x = random_qkv(2, 23, 4, 4, 8)[0]

    def work(attend, mine):
        for _ in range(2):
            h = layer(mine.flatten(2)).unflatten(2, (4, 8))
            out, lse = attend(h)
            mine = mine + out
        return Result(mine.square().sum(), {"lse": [lse], "out": (mine, None, "text")})

    def on_rank(ring):
        options = {"process_group": ring, "causal": True, "return_lse": True}
        return work(lambda h: burst_attn_func(h, h, h, **options), shard(x, ring.rank, ring.size))

    alone = work(lambda h: burst_attn_func(h, h, h, causal=True, return_lse=True), x)
    wanted = torch.autograd.grad(alone.loss, layer.parameters())
    results = simulate(RANKS, on_rank)
    assert results[0].rest["lse"][0].requires_grad
    assert results[1].rest["out"][1:] == (None, "text")
    loss = sum(result.loss for result in results)
    assert_equal(torch.autograd.grad(loss, layer.parameters(), retain_graph=True), wanted)
    whole = unshard([result.rest["out"][0] for result in results])
    assert_equal(torch.autograd.grad(whole.square().sum(), layer.parameters()), wanted)


def test_a_rank_whose_result_is_not_used_takes_part():
    tensors, dout = inputs()
    outs = simulate(RANKS, lambda ring: attention(ring, *tensors))
    shares = [shard(dout, rank, RANKS) for rank in range(RANKS)]
    parts = [
        torch.autograd.grad(out, tensors, share) for out, share in zip(outs, shares, strict=True)
    ]
    assert_equal([sum(grads) for grads in zip(*parts, strict=True)])


def test_a_tensor_that_a_rank_made_gets_its_gradient():
    tensors, dout = inputs()

    def work(ring):
        mine = [shard(x.detach(), ring.rank, ring.size).requires_grad_() for x in tensors]
        return burst_attn_func(*mine, causal=True, process_group=ring), mine

    outs, shards = zip(*simulate(RANKS, work), strict=True)
    unshard(outs).backward(dout)
    assert_equal([unshard([x.grad for x in same]) for same in zip(*shards, strict=True)])


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_rank_that_fails_in_its_backward_ends_the_others(kind):
    tensors, _ = inputs()

    def fail(grad):
        raise kind("rank 1 has a problem")

    def work(ring):
        mine = [shard(x, ring.rank, ring.size) for x in tensors]
        out = burst_attn_func(*mine, process_group=ring)
        if ring.rank == 1:
            out.register_hook(fail)
        return out

    out = unshard(simulate(RANKS, work))
    with pytest.raises(kind, match="rank 1 has a problem"):
        out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="failed earlier: run simulate again"):
        out.sum().backward()


def test_an_error_after_a_message_came_is_raised(monkeypatch):
    """The ring waits for its messages once more. That is not what is told."""

    def fail(self, event):
        added = add_returned(self, event)
        if self.program.rank == 1:
            raise ZeroDivisionError
        return added

    add_returned = execution.Execution._add_returned
    monkeypatch.setattr(execution.Execution, "_add_returned", fail)
    tensors, dout = inputs()
    out = unshard(simulate(2, lambda ring: attention(ring, *tensors, backward="kv")))
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(out, tensors, dout)


def test_reentrant_checkpointing_is_refused_by_name():
    """Its backward; one that a rank calls itself works."""
    tensors, _ = inputs()

    def work(ring, reentrant):
        mine = [shard(x, ring.rank, ring.size) for x in tensors]
        attend = functools.partial(burst_attn_func, process_group=ring)
        return checkpoint(attend, *mine, use_reentrant=reentrant)

    outs = simulate(2, lambda ring: work(ring, True))
    with pytest.raises(
        RuntimeError, match=r"does not support: call .* with use_reentrant=False inside simulate"
    ):
        unshard(outs).sum().backward()
    unshard(simulate(2, lambda ring: work(ring, False))).sum().backward()
    once = [x.grad.clone() for x in tensors]
    simulate(2, lambda ring: work(ring, True).sum().backward())
    for x, grad in zip(tensors, once, strict=True):
        assert torch.allclose(x.grad, 2 * grad)


def test_ranks_that_wait_for_one_that_is_gone_are_told():
    tensors, _ = inputs()
    outs = simulate(
        RANKS,
        lambda ring: attention(ring, *tensors) if ring.rank else attention(ring, *tensors).detach(),
    )
    with pytest.raises(RankFailed, match="rank 0 takes no part"):
        outs[1].sum().backward()
    with pytest.raises(RankFailed, match="rank 0 takes no part"):
        simulate(2, lambda ring: attention(ring, *tensors) if ring.rank else None)


def test_second_derivatives_are_refused():
    tensors, _ = inputs()
    out = unshard(simulate(2, lambda ring: attention(ring, *tensors)))
    with pytest.raises(
        RuntimeError,
        match="the result of simulate is differentiable once: expected a backward without",
    ):
        torch.autograd.grad(out.sin().sum(), tensors[0], create_graph=True)
    out.sum().backward()  # no rank has begun anything that it would have to break off


def test_hooks_of_leaves_do_not_run_more_than_once():
    tensors, dout = inputs()
    out = unshard(simulate(RANKS, lambda ring: attention(ring, *tensors)))
    hook = tensors[0].register_hook(lambda grad: 2 * grad)
    with pytest.raises(
        RuntimeError,
        match=r"leaves without tensor hooks, .* got one of shape \(2, 23, 4, 8\) with 1",
    ):
        out.backward(dout, retain_graph=True)
    hook.remove()
    seen = []
    tensors[0].register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    out.backward(dout)
    assert_equal([x.grad for x in tensors])
    assert_equal(seen, expected()[:1])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_modes_hold_on_the_ranks(context):
    tensors, _ = inputs()
    with context():
        out = unshard(simulate(2, lambda ring: attention(ring, *tensors)))
        modes = simulate(
            2, lambda ring: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        )
        assert modes == [(torch.is_grad_enabled(), torch.is_inference_mode_enabled())] * 2
    assert out.requires_grad == (context is torch.enable_grad)
    assert out.is_inference() == (context is torch.inference_mode)


def test_the_callers_autocast_holds_on_the_ranks():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.float16):
        assert {y.dtype for y in simulate(2, lambda ring: x @ x)} == {torch.float16}
    assert {y.dtype for y in simulate(2, lambda ring: x @ x)} == {torch.float32}


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (0, "ValueError: size: expected at least one rank, got 0"),
        (-1, "ValueError: size: expected at least one rank, got -1"),
        (2.5, r"TypeError: size must be a whole number, got 2\.5"),
        (True, "TypeError: size must be a whole number, got True"),
        ("2", "TypeError: size must be a whole number, got '2'"),
        (torch.tensor(2), "TypeError: size must be a whole number, got a Tensor"),
    ],
)
def test_impossible_numbers_of_ranks_are_refused(size, error):
    with refusal(error):
        simulate(size, lambda ring: None)


def test_a_put_that_is_not_contiguous_is_refused():
    """Its bytes would be those of its neighbours in memory, and as many."""

    def work(ring):
        ring.reserve({"visit": 64, "return": 0}, torch.device("cpu"))
        put = Put(torch.zeros(2, 4, dtype=torch.float32)[:, :2], 1 - ring.rank, 0)
        ring.deliver("visit", 64, [put], [], torch.device("cpu"))

    with pytest.raises(AssertionError, match="a put must be contiguous"):
        simulate(2, work)


def doubled(x: Tensor) -> Tensor:
    """The sum of what ranks make of their shards of x, which simulate cuts off from its graph."""
    return sum(simulate(2, lambda ring: (2 * shard(x, ring.rank, 2)).sum()))


TRANSFORMS = {
    "grad": torch.func.grad(doubled),
    "jvp": lambda x: torch.func.jvp(doubled, (x,), (x,)),
    "vmap": lambda x: torch.vmap(doubled)(x.unsqueeze(0)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_simulated_ranks_raise(name):
    message = "simulate cannot be transformed by torch.func or vmap"
    with pytest.raises(RuntimeError, match=message):
        TRANSFORMS[name](torch.ones(1, 4, 1, 8))
