"""Losses of a shard: sums and counts; the tiled projection and loss against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_burst import IGNORE_INDEX, loss
from bmt_burst.loss import cross_entropy_sum, linear_cross_entropy_sum


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
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(2, tokens, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (2, tokens), generator=generator)
    labels[:, ::3] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def results(function, hidden, weight, labels, factor=0.37):
    total, count = function(hidden, weight, labels)
    return [total.detach(), count, *torch.autograd.grad(total * factor, (hidden, weight))]


# A few units in the last place: plain and tiled round logits and gradients alike, but sums go another way.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (5, 7), (16, 8), (23, 31)])
@pytest.mark.parametrize("tile", [(3, 4), (16, 8), (1000, 1000)])
def test_tiled_equals_plain(monkeypatch, dtype, bound, tokens, vocabulary, tile):
    monkeypatch.setattr(loss, "_TILE_TOKENS", tile[0])
    monkeypatch.setattr(loss, "_TILE_ENTRIES", tile[1])
    tensors = case(tokens, vocabulary, dtype)
    for mine, expected in zip(results(linear_cross_entropy_sum, *tensors), results(plain, *tensors), strict=True):
        assert mine.dtype == expected.dtype or dtype == torch.float64
        assert torch.allclose(mine.double(), expected.double(), rtol=bound, atol=bound)


def test_tiled_gradients_by_finite_differences(monkeypatch):
    monkeypatch.setattr(loss, "_TILE_TOKENS", 3)
    monkeypatch.setattr(loss, "_TILE_ENTRIES", 4)
    hidden, weight, labels = case(4, 10, torch.float64, size=3)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy_sum(h, w, labels)[0], (hidden, weight))


def test_a_shard_without_targets_adds_nothing():
    hidden, weight, labels = case(5, 7, torch.float32)
    total, count, dhidden, dweight = results(linear_cross_entropy_sum, hidden, weight, labels.fill_(IGNORE_INDEX))
    assert (total, count) == (0, 0)
    assert not dhidden.any()
    assert not dweight.any()


def test_logits_are_never_whole(monkeypatch):
    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    self.entries = max(self.entries, x.numel())
            return result

    monkeypatch.setattr(loss, "_TILE_TOKENS", 8)
    monkeypatch.setattr(loss, "_TILE_ENTRIES", 16)
    tensors = case(40, 160, torch.float32)
    with Largest() as largest:
        results(linear_cross_entropy_sum, *tensors)
    assert largest.entries == 160 * 12  # the weights; all logits would be 80 * 160


def test_large_logits_do_not_overflow():
    hidden, weight, labels = case(6, 9, torch.float32)
    total, _, dhidden, _ = results(linear_cross_entropy_sum, hidden * 1e4, weight, labels)
    assert total.isfinite()
    assert dhidden.isfinite().all()


@pytest.mark.parametrize("label", [-1, 7, 1000])
def test_labels_outside_the_vocabulary_are_refused(label):
    hidden, weight, labels = case(5, 7, torch.float32)
    labels[0, 1] = label
    with pytest.raises(ValueError, match=f"label {label} is not in a vocabulary of 7"):
        linear_cross_entropy_sum(hidden, weight, labels)
