"""SequenceParallel: its layouts, unshard and sum with their gradients, and ranks that differ."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bmt_burst import Layout, Mask, SequenceParallel, init_sequence_parallel, simulate
from bmt_burst.errors import RankLate, RanksDisagree
from tests.launcher import run_ranks
from tests.reference import relative_error
from tests.refusals import TRANSFORMS, refusal, transform
from tests.rings import ring_arguments

TOKENS = 13
MASK = Mask.documents((0, 3, 4, TOKENS))


def sp_of(ring, inner: int | None = None, layout: str | Layout = "zigzag") -> SequenceParallel:
    groups = {"process_group": None, **ring_arguments(ring, inner or ring.size)}
    return SequenceParallel(ring.rank, ring.size, layout, **groups)


def whole_loss(w: Tensor, v: Tensor, sp: SequenceParallel, dim: int = 1) -> Tensor:
    """A loss of whole sequences, not linear in what ranks join and add up.

    w is used before the cut and v (E,) on each rank's tokens. Positions weigh the tokens.
    """
    x = torch.linspace(-1, 1, 2 * TOKENS * 4, dtype=w.dtype).view(2, TOKENS, 4) @ w
    mine = sp.shard(x).tanh() * v
    whole = sp.unshard(mine.movedim(1, dim), TOKENS, dim).movedim(dim, 1)
    places = torch.arange(TOKENS, dtype=w.dtype).view(-1, 1)
    pooled = (whole * places).sum(1).sin()
    rest = sp.sum(mine.pow(2).sum()).log() + sp.sum(mine.sum((1, 2))).cos().sum()
    return (pooled * whole[:, -1]).sum() + rest


def parameters() -> list[Tensor]:
    torch.manual_seed(0)  # the same again if a test calls it again
    shapes = (4, 3), (3,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("size", "inner", "layout", "dim"),
    [
        (1, 1, "zigzag", 1),
        (2, 2, "zigzag", 1),
        (3, 3, "striped", -1),
        (3, 3, Layout.balanced(MASK, 3), 0),
        (4, 2, "zigzag", 2),
        (6, 3, "contiguous", -3),
    ],
)
def test_the_mean_of_gradients_is_the_gradient_of_a_loss_of_whole_tensors(size, inner, layout, dim):
    expected = whole_loss(*(alone := parameters()), SequenceParallel())
    expected.backward()
    for used in (slice(None), slice(1)):  # a loss that only rank 0 uses has its gradient too
        mine = parameters()
        losses = simulate(size, lambda r, m=mine: whole_loss(*m, sp_of(r, inner, layout), dim))
        assert all(loss.equal(losses[0]) for loss in losses)  # in the last bit, too
        assert relative_error(losses[0], expected) < 1e-13
        (sum(losses[used]) / len(losses[used])).backward()
        for got, other in zip(mine, alone, strict=True):
            assert relative_error(got.grad, other.grad) < 1e-13


def test_half_precision_is_added_up_in_fp32_also_under_autocast():
    def work(ring):
        x = torch.full((5,), [256.0, 1.0, 1.0][ring.rank], dtype=torch.bfloat16).requires_grad_()
        sp = sp_of(ring)
        with torch.autocast("cpu", torch.bfloat16):
            total, whole = sp.sum(x), sp.unshard(x[None, :, None].relu(), 15)
            (total * x.detach()).sum().backward(retain_graph=True)
            gradient, x.grad = x.grad, None
            (whole * x.detach()[0]).sum().backward()
        assert total.dtype == gradient.dtype == whole.dtype == torch.bfloat16
        assert total.eq(258).all() and gradient.eq(258).all() and x.grad.eq(258).all()

    simulate(3, work)


def test_integers_and_bools_have_no_gradient_and_complex_numbers_do():
    def work(ring):
        sp, rank = sp_of(ring), ring.rank
        counts = sp.sum(torch.full((2,), 200 + rank, dtype=torch.uint8))
        assert counts.dtype == torch.int64 and counts.tolist() == [401, 401]
        assert sp.sum(torch.tensor(rank == 0)).equal(torch.tensor(1))
        assert sp.sum(torch.zeros(0, 3)).shape == (0, 3)
        assert not sp.unshard(torch.ones(1, 2, dtype=torch.bool), 4).requires_grad
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        total = sp.sum(x.conj())
        total *= 1  # as callers divide a loss in place
        assert total.equal(2 * x.detach().conj().resolve_conj())
        total.imag.sum().backward()
        assert x.grad.equal(torch.full((2,), -2j))
        with torch.no_grad():
            assert not sp.sum(x.real).requires_grad
        return True

    assert all(simulate(2, work))


def second_derivative(sp: SequenceParallel, x: Tensor) -> None:
    torch.autograd.grad(sp.unshard(x, 4).pow(2).sum(), x, create_graph=True)


OF_SUM = [
    (lambda sp, x, kind=kind: transform(kind, sp.sum, x), error.format("sum"))
    for kind, error in TRANSFORMS.items()
]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (second_derivative, "unshard is differentiable once: expected a backward without create"),
        *OF_SUM,
        (lambda sp, x: sp.sum(x[:, :1]), "ranks differ in shape of sum: .*2.*1"),
        (lambda sp, x: sp.sum(x.double()), "ranks differ in dtype of sum: .*float32.*float64"),
        (lambda sp, x: sp.sum(None), "x must be a torch.Tensor, got NoneType"),
        (lambda sp, x: sp.sum(x.detach()), "recording of gradients of sum: .*True.* False"),
        (lambda sp, x: sp.sum(x.to("meta")), "got meta"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(wrong, words):
    """Rank 1 does it. Where its backward is refused, the others are in theirs."""

    def work(ring):
        sp, x = sp_of(ring), torch.ones(1, 2, requires_grad=True)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            if ring.rank == 1:
                wrong(sp, x)
            elif wrong is second_derivative:
                sp.unshard(x, 4).sum().backward()
            else:
                sp.sum(x).sum().backward()
        assert sp.sum(x.detach()).eq(2).all()  # the group is still in order
        return True

    assert all(simulate(2, work))


def error_of_sums(sp: SequenceParallel, device: str = "cpu") -> float:
    """The error of the gradient of a loss of joined and added tensors, as DDP averages it."""
    x = torch.linspace(-1, 1, 26, dtype=torch.float64, device=device).view(2, 13).requires_grad_()
    part = sp.shard(x.sin())
    (sp.unshard(part, 13).cumsum(1).pow(2).sum() * sp.sum(part.sum())).backward()
    dist.all_reduce(x.grad)
    alone = x.detach().requires_grad_()
    (alone.sin().cumsum(1).pow(2).sum() * alone.sin().sum()).backward()
    return relative_error(x.grad / sp.size, alone.grad)


def differ_in_backward(rank: int) -> None:
    """Ranks call backward in different orders, then rank 1 does not; it is late, but lives."""
    sp = init_sequence_parallel(timeout=1.0)
    x, store = torch.ones(1, 2, requires_grad=True), dist.distributed_c10d._get_default_store()
    first, second = sp.unshard(x, 4).sum(), sp.sum(x).sum()
    orders = (
        "rank 0 begins the backward of call 1, of unshard, rank 1 begins the backward of call 2"
    )
    with pytest.raises(RanksDisagree, match=f"ranks do not do the same: {orders}, of sum"):
        (second if rank else first).backward()
    first.backward()
    assert x.grad.eq(2).all()
    if rank:
        store.wait(["rank 0 has waited"], timedelta(seconds=60))
        return
    late = "rank 1 of the group did not make this call within 1 s"
    with pytest.raises(RankLate, match=f"the backward of call 2, of sum: {late}"):
        second.backward()
    store.set("rank 0 has waited", "")


def test_ranks_that_do_not_call_the_same_backward_raise():
    run_ranks(2, differ_in_backward)


DOCUMENTS = Mask.documents((0, 5, 6, 21))


def test_a_layout_of_ones_own_cuts_and_joins_as_a_named_one():
    x = torch.arange(2 * 21 * 3).view(2, 21, 3)
    layout = Layout.balanced(DOCUMENTS, 3)

    def work(ring):
        named = SequenceParallel(ring.rank, 3, process_group=ring)
        sp = named.with_layout(layout)
        assert (named.layout, sp.layout) == ("zigzag", layout)
        assert sp.groups == named.groups | {"layout": layout}
        assert sp.positions(21).equal(layout.positions(ring.rank))
        assert sp.shard(x).equal(layout.shard(x, ring.rank))
        assert sp.unshard(sp.shard(x), 21).equal(x)
        assert sp.with_layout("striped").unshard(sp.with_layout("striped").shard(x), 21).equal(x)
        return sp.with_layout("zigzag") == named

    assert all(simulate(3, work))


def test_a_layout_is_for_its_length_and_its_ranks():
    sp = SequenceParallel(1, 2).with_layout(Layout.balanced(DOCUMENTS, 2))
    for call in (
        lambda: sp.positions(20),
        lambda: sp.shard(torch.zeros(1, 20)),
        lambda: sp.layout_of(20),
    ):
        with refusal("ValueError: the layout is for sequences of 21 tokens, got one of 20"):
            call()
    with pytest.raises(ValueError, match="expected a layout on 2 ranks, got one on 3"):
        sp.with_layout(Layout.zigzag(21, 3))
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        sp.with_layout("ring")
    with pytest.raises(TypeError, match=r"layout must be one of .*, got int"):
        sp.with_layout(3)
    assert SequenceParallel().with_layout("striped").layout_of(7) == Layout.striped(7, 1)


def test_a_layout_of_ones_own_is_copied_and_pickled_with_its_groups():
    sp = SequenceParallel().with_layout(Layout.balanced(DOCUMENTS, 1))
    for again in (copy.deepcopy(sp), pickle.loads(pickle.dumps(sp))):
        assert again == sp
        assert again.layout_of(21) == Layout.balanced(DOCUMENTS, 1)
