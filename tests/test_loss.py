"""Losses of a shard: sums and counts; the tiled projection and loss against the plain one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_burst import IGNORE_INDEX, loss
from bmt_burst.loss import (
    count_targets,
    cross_entropy_sum,
    linear_cross_entropy_by_row,
    linear_cross_entropy_sum,
    score_tokens,
    token_logprobs,
)
from tests.largest import Largest
from tests.reference import relative_error
from tests.refusals import refusal


def test_loss_is_a_sum_and_a_count():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, :3] = IGNORE_INDEX
    total, count = cross_entropy_sum(logits, labels)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert int(count) == 7
    assert torch.allclose(total / count, mean)
    nothing, none = cross_entropy_sum(logits, torch.full_like(labels, IGNORE_INDEX))
    assert (float(nothing.detach()), int(none)) == (0.0, 0)
    assert not torch.autograd.grad(nothing, logits)[0].any()


def plain(hidden, weight, labels):
    return cross_entropy_sum(F.linear(hidden, weight), labels)


def case(tokens, vocabulary, dtype, size=12):
    torch.manual_seed(0)  # the same again if a test calls it again
    hidden = torch.randn(2, tokens, size, dtype=torch.float64)
    weight = torch.randn(vocabulary, size, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (2, tokens))
    labels[:, ::3] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def test_rows_have_their_own_sums_without_a_gradient():
    """Each row as if it were alone; the sum and its gradients are unchanged, bit for bit."""
    hidden, weight, labels = case(37, 50, torch.float32)
    labels[1] = IGNORE_INDEX
    *whole, sums = linear_cross_entropy_by_row(hidden, weight, labels)
    for row, mine in enumerate(sums):
        alone, _ = linear_cross_entropy_sum(hidden[row], weight, labels[row])
        assert float(mine) == pytest.approx(float(alone.detach()), rel=1e-6)
    assert sums[0] > 0 == sums[1]
    with pytest.raises(RuntimeError, match="does not require grad"):
        sums.sum().backward()
    expected = results(linear_cross_entropy_sum, hidden, weight, labels)
    found = results(lambda *_: whole, hidden, weight, labels)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def results(function, hidden, weight, labels, factor=0.37):
    total, count = function(hidden, weight, labels)
    return [total.detach(), count, *torch.autograd.grad(total * factor, (hidden, weight))]


def in_tiles_of(monkeypatch, tokens):
    monkeypatch.setattr(loss, "tile_tokens", lambda *_: tokens)


# A few units in the last place: plain and tiled round logits and gradients alike, but sums go
# another way.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (16, 8), (23, 31)])
@pytest.mark.parametrize("tile", [3, 1000])
def test_tiled_equals_plain(monkeypatch, dtype, bound, tokens, vocabulary, tile):
    in_tiles_of(monkeypatch, tile)
    tensors = case(tokens, vocabulary, dtype)
    for mine, expected in zip(
        results(linear_cross_entropy_sum, *tensors), results(plain, *tensors), strict=True
    ):
        assert mine.dtype == expected.dtype
        assert torch.allclose(mine.double(), expected.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_weights_in_parts_are_as_one(monkeypatch, frozen):
    """No part is copied: nothing is as large as all of them."""
    in_tiles_of(monkeypatch, 8)
    hidden, weight, labels = case(7, 43, torch.float32, size=64)
    labels[0, 1] = 42
    total, count, dhidden, dweight = results(linear_cross_entropy_sum, hidden, weight, labels)
    parts = [x.detach().requires_grad_(i != frozen) for i, x in enumerate(weight.split([40, 3]))]
    with Largest() as largest:
        found, found_count = linear_cross_entropy_sum(hidden, parts, labels)
        (found * 0.37).backward()
    assert largest.entries < weight.numel()
    assert found_count == count
    pairs = [(found.detach(), total), (hidden.grad, dhidden)]
    for i, (part, expected) in enumerate(zip(parts, dweight.split([40, 3]), strict=True)):
        if i == frozen:
            assert part.grad is None
        else:
            pairs.append((part.grad, expected))
    for mine, expected in pairs:
        assert relative_error(mine, expected) < 1e-6  # sums over entries have another order
    with pytest.raises(TypeError, match="hidden and weight: expected one dtype"):
        linear_cross_entropy_sum(hidden, [parts[0], parts[1].double()], labels)
    with pytest.raises(ValueError, match="is not in a vocabulary of 40"):
        linear_cross_entropy_sum(hidden, parts[:1], labels)


def test_logits_are_never_whole(monkeypatch):
    in_tiles_of(monkeypatch, 8)
    tensors = case(40, 160, torch.float32)
    with Largest() as largest:
        results(linear_cross_entropy_sum, *tensors)
    assert largest.entries == 160 * 12  # the weights; all logits would be 80 * 160


def test_tiles_are_equal_and_of_at_most_512_mib():
    """Or of 1,024 tokens."""
    for tokens, entries, dtype, expected in (
        (16384, 73448, torch.bfloat16, 3328),  # 5 tiles
        (16384, 73448, torch.float32, 1792),
        (100, 73448, torch.bfloat16, 256),
        (4096, 1 << 20, torch.float32, 1024),
        (0, 5, torch.float32, 256),
    ):
        found = loss.tile_tokens(tokens, entries, dtype)
        assert found == expected
        assert found == 1024 or found * entries * dtype.itemsize <= 512 << 20


def test_gradients_are_scaled_by_that_of_the_sum():
    """Again in a second backward, which finds them as they were."""
    hidden, weight, labels = case(5, 7, torch.float32)
    once = results(linear_cross_entropy_sum, hidden, weight, labels, factor=1.0)[2:]
    total, _ = linear_cross_entropy_sum(hidden, weight, labels)
    for factor in (-2.0, 0.0, 0.5):
        scaled = torch.autograd.grad(total * factor, (hidden, weight), retain_graph=True)
        assert all(a.equal(b * factor) for a, b in zip(scaled, once, strict=True))


def test_a_tied_weight_gets_both_gradients():
    _, weight, labels = case(5, 7, torch.float64)
    tokens = torch.randint(0, 7, (2, 5))
    found, expected = (
        torch.autograd.grad(function(weight[tokens], weight, labels)[0], weight)[0]
        for function in (linear_cross_entropy_sum, plain)
    )
    assert relative_error(found, expected) < 1e-13


def test_nothing_is_lost_in_fp16():
    """The gradient of the sum does not fit into fp16, and those of the mean would underflow."""
    tokens = 4096
    hidden, weight, labels = torch.full((1, tokens, 2), 64.0), torch.zeros(2, 2), torch.zeros(1, 1)
    labels = labels.long().expand(1, tokens)
    hidden, weight = (x.half().requires_grad_() for x in (hidden, weight))
    total, count = linear_cross_entropy_sum(hidden, weight, labels)
    (dweight,) = torch.autograd.grad(total / count, weight)
    assert dweight.tolist() == [[-32.0] * 2, [32.0] * 2]


def test_large_logits_do_not_overflow():
    hidden, weight, labels = case(6, 9, torch.float32)
    total, _, dhidden, _ = results(linear_cross_entropy_sum, hidden * 1e4, weight, labels)
    assert total.isfinite()
    assert dhidden.isfinite().all()


SHAPES = r"labels: expected shape \(2, 5\), one a token, got "
SIZES, DTYPE = "hidden and weight: expected ", "one dtype, got torch."
WRONG = [
    (lambda h, w, y: (h, w, y[:, :-1]), rf"ValueError: {SHAPES}\(2, 4\)"),
    (lambda h, w, y: (h, w, y.int()), "TypeError: labels: expected int64, got torch.int32"),
    (lambda h, w, y: (h, w, y.to("meta")), "ValueError: labels: expected them on cpu, got .* meta"),
    (lambda h, w, y: (h, w, y.tolist()), "TypeError: labels must be a torch.Tensor, got list"),
    (lambda h, w, y: (h, w.T, y), r"ValueError: got shapes \(2, 5, 12\) and \(12, 7\)"),
    (lambda h, w, y: (h.bfloat16(), w, y), f"TypeError: {DTYPE}bfloat16 and torch.float32"),
    (lambda h, w, y: (h, w.double(), y), f"TypeError: {DTYPE}float32 and torch.float64"),
    (lambda h, w, y: (h.long(), w, y), "TypeError: hidden: expected fp16, .*, got torch.int64"),
    (lambda h, w, y: (h, w.to("meta"), y), "TypeError: weight: expected a tensor with values"),
    (lambda h, w, y: (h, w.to_sparse(), y), "TypeError: weight must be a dense tensor"),
]


@pytest.mark.parametrize(("change", "error"), WRONG)
def test_arguments_that_do_not_go_together_are_refused(change, error):
    with refusal(error):
        linear_cross_entropy_sum(*change(*case(5, 7, torch.float32)))


def test_logits_and_labels_that_do_not_go_together_are_refused():
    logits, labels = torch.randn(2, 5, 7), torch.zeros(2, 5, dtype=torch.int64)
    for other in (labels.T, labels[:, 1:], labels.flatten()):
        with pytest.raises(ValueError, match="one a token"):
            cross_entropy_sum(logits, other)
    for flat in (logits[0, 0], logits.sum()):
        with pytest.raises(ValueError, match="logits: expected"):
            cross_entropy_sum(flat, labels[0, 0])
    with pytest.raises(TypeError, match="expected int64"):
        cross_entropy_sum(logits, labels.int())
    with pytest.raises(ValueError, match="label 7 is not in a vocabulary of 7"):
        cross_entropy_sum(logits, labels + 7)
    with pytest.raises(TypeError, match=r"signed integer dtype, got torch\.uint8"):
        count_targets(labels.byte())


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (0, 3), (2, 0)])
def test_tokens_may_lie_in_any_number_of_dimensions(shape):
    hidden = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, shape)
    total, count = linear_cross_entropy_sum(hidden, weight, labels)
    expected = F.cross_entropy(
        (hidden @ weight.T).flatten(0, -2), labels.flatten(), reduction="sum"
    )
    assert count == labels.numel()
    assert torch.allclose(total, expected)
    inputs = (hidden, weight)
    for a, b in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert torch.allclose(a, b)


def under_autocast(function, hidden, weight, labels, dtype, factor):
    """The gradients of a mean loss that was scaled by `factor`, without it."""
    with torch.autocast("cpu", dtype):
        total, count = function(hidden, weight, labels)
    grads = torch.autograd.grad(total / count * factor, (hidden, weight))
    assert [grad.dtype for grad in grads] == [hidden.dtype, weight.dtype]
    return [grad.double() / factor for grad in grads]


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.0), (torch.float16, 65536.0)])
@pytest.mark.parametrize("given", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_under_autocast_gradients_are_as_good_as_a_linear_layers(dtype, factor, given):
    hidden = torch.randn(2, 40, 64).to(given[0])
    weight = torch.randn(3000, 64).mul(0.5).to(given[1])
    labels = torch.randint(0, 3000, (2, 40))
    inputs = [x.requires_grad_() for x in (hidden, weight)]
    exact = results(
        plain, *(x.detach().double().requires_grad_() for x in inputs), labels, 1 / labels.numel()
    )[2:]
    errors = {}
    for function in (linear_cross_entropy_sum, plain):
        grads = under_autocast(function, *inputs, labels, dtype, factor)
        errors[function] = [relative_error(a, b) for a, b in zip(grads, exact, strict=True)]
    for mine, theirs in zip(errors[linear_cross_entropy_sum], errors[plain], strict=True):
        assert mine < 1.1 * theirs  # sums over tiles round once a tile


class Products(TorchDispatchMode):
    """Counts the matrix products that are made within."""

    count = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.count += "mm" in function.__name__
        return function(*args, **(kwargs or {}))


def test_what_needs_no_gradient_gets_none_and_no_product():
    hidden, weight, labels = case(5, 7, torch.float32)
    dhidden, dweight = results(linear_cross_entropy_sum, hidden, weight, labels, factor=1.0)[2:]
    with Products() as products:
        total, _ = linear_cross_entropy_sum(hidden, weight.detach(), labels)
        assert torch.autograd.grad(total, hidden)[0].equal(dhidden)
        assert products.count == 2
        total, _ = linear_cross_entropy_sum(hidden.detach(), weight, labels)
        assert torch.autograd.grad(total, weight)[0].equal(dweight)
        assert products.count == 4
        with torch.no_grad():
            assert linear_cross_entropy_sum(hidden, weight, labels)[0].equal(total)
        assert products.count == 5
    with torch.inference_mode():
        assert linear_cross_entropy_sum(hidden, weight, labels)[0].equal(total)


def test_second_derivatives_are_refused():
    """A gradient penalty would silently lose its term."""
    hidden, weight, labels = (
        torch.randn(4, 8, requires_grad=True),
        torch.randn(5, 8),
        torch.arange(4),
    )
    total, _ = linear_cross_entropy_sum(hidden, weight, labels)
    with pytest.raises(
        RuntimeError, match="linear_cross_entropy_sum is differentiable once: expected a backward"
    ):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_scores_of_tokens_equal_those_of_whole_logits(monkeypatch):
    """In tiles, with equal logits, of which argmax takes the first."""
    in_tiles_of(monkeypatch, 4)
    hidden = torch.randn(2, 7, 6).round()
    weight = torch.randn(23, 6).round()
    labels = torch.randint(23, (2, 7))
    labels[0, :3] = IGNORE_INDEX
    logits = hidden @ weight.T
    assert (logits.sort(-1).values.diff() == 0).any()
    losses, best = score_tokens(hidden, weight, labels)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    torch.testing.assert_close(losses.flatten(), expected)
    assert torch.equal(best, logits.argmax(-1))
    _, none = score_tokens(hidden * math.nan, weight, labels)
    assert (none == -1).all()


def test_a_backward_within_autocast_is_the_same():
    tensors = case(5, 7, torch.float32)
    expected = results(linear_cross_entropy_sum, *tensors)
    total, _ = linear_cross_entropy_sum(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.autograd.grad(total * 0.37, tensors[:2])
    assert all(a.equal(b) for a, b in zip(grads, expected[2:], strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parts", [1, 3])
def test_log_probabilities_and_entropies_of_targets(temperature, parts, monkeypatch):
    """And their gradients, over several tiles and weights that are concatenated."""
    monkeypatch.setattr(loss, "_WIDENED_TOKENS", 7)
    hidden, weight, targets = case(19, 50, torch.float64)
    has = targets != IGNORE_INDEX
    found = token_logprobs(hidden, weight.tensor_split(parts), targets, temperature, entropies=True)
    wide = (hidden @ weight.T / temperature).log_softmax(-1)
    of_targets = wide.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1).where(has, 0)
    expected = of_targets, -(wide.exp() * wide).sum(-1).where(has, 0)
    factors = [torch.randn(2, 19, dtype=torch.float64) for _ in found]
    grads = (torch.autograd.grad(x, (hidden, weight), factors) for x in (found, expected))
    for ours, theirs in zip((*found, *next(grads)), (*expected, *next(grads)), strict=True):
        assert (ours - theirs).detach().abs().max() < 1e-11  # entries below 100
    losses, _ = score_tokens(hidden / temperature, weight, targets)
    assert (token_logprobs(hidden, weight, targets, temperature) + losses).abs().max() < 1e-12
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(hidden, weight, targets, 0.0)
