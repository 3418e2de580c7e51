"""The linear layers of a block with the operations around them, against plain modules."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from bmt_burst.fused.functions import RMSNorm
from models.cpm import CPM
from models.linears import add_gated_linear, add_linear, add_swiglu_linear, are_plain, norm_linears
from tests.test_model import SMALL
from tests.test_passes import DEVICE, random

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


class Part(nn.Module):
    """The linear layers of a block, in plain modules."""

    def __init__(self, bias):
        super().__init__()
        self.norm = RMSNorm(12, 1e-5)
        self.one, self.two = nn.Linear(12, 20, bias=bias), nn.Linear(12, 20, bias=bias)
        self.down, self.out = nn.Linear(20, 12, bias=bias), nn.Linear(20, 12, bias=bias)

    def forward(self, x):
        normed = self.norm(x)
        one, two = self.one(normed), self.two(normed)
        x = x + 0.3 * self.down(F.silu(one) * two)
        return x + 0.3 * self.out(one)


class FusedPart(Part):
    def forward(self, x):
        x, one, two = norm_linears(x, self.norm, (self.one, self.two))
        x = add_swiglu_linear(x, one, two, self.down, 0.3)
        return add_linear(x, one, self.out, 0.3)


class Gated(nn.Module):
    """A gate and a projection, with a norm or without."""

    def __init__(self, bias, has_norm):
        super().__init__()
        self.norm = RMSNorm(12, 1e-5) if has_norm else None
        self.gate, self.out = nn.Linear(12, 12), nn.Linear(12, 12, bias=bias)

    def forward(self, x):
        normed = x if self.norm is None else self.norm(x)
        return x + 0.3 * self.out(normed * self.gate(x).sigmoid())


class FusedGated(Gated):
    def forward(self, x):
        return add_gated_linear(x, x, self.norm, self.gate(x), self.out, 0.3)


def check_fused(plain: nn.Module, kind: type[nn.Module], *shape: int) -> None:
    """Check results and all gradients against a fused `kind` in fp64, to rounding."""
    plain = plain.double().to(DEVICE)
    if plain.norm is not None:
        nn.init.normal_(plain.norm.weight)
    fused = copy.deepcopy(plain)
    fused.__class__ = kind
    found = []
    for part in (plain, fused):
        x = random(*shape).double().requires_grad_()
        y = part(x)
        y.backward(random(*shape, seed=1).double())
        found.append([y.detach(), x.grad, *(p.grad for p in part.parameters())])
    for x, y in zip(*found, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_layers_equal_modules(bias):
    for shape in ((2, 7, 12), (9, 12)):
        check_fused(Part(bias), FusedPart, *shape)
    for has_norm in (False, True):
        check_fused(Gated(bias, has_norm), FusedGated, 2, 7, 12)


def test_frozen_weights_have_no_gradients():
    part = FusedPart(bias=True).to(DEVICE)
    part.requires_grad_(requires_grad=False)
    x = random(3, 12).requires_grad_()
    part(x).sum().backward()
    assert all(p.grad is None for p in part.parameters())
    assert x.grad.abs().sum() > 0


def test_fused_linear_layers_are_differentiable_once():
    part = FusedPart(bias=False).to(DEVICE)
    x = random(3, 12).requires_grad_()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(part(x).sum(), x, create_graph=True)


def test_only_plain_linear_layers_are_fused():
    class Other(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    quantized = nn.Linear(2, 2)
    quantized.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    assert are_plain([nn.Linear(2, 2)])
    for module in (Other(2, 2), hooked, quantized, nn.Sequential(nn.Linear(2, 2))):
        assert not are_plain([nn.Linear(2, 2), module])


@pytest.mark.parametrize("name", ["mlp", "mlp.up_proj", "post_attention_layernorm"])
def test_hooks_inside_a_block_are_called(name):
    """A call in parts computes the same, to rounding."""
    model, tokens = CPM(SMALL).to(DEVICE), torch.arange(9, device=DEVICE)
    expected, called = model(tokens[None], tokens), []
    part = model.get_submodule(f"layers.0.{name}")
    part.register_forward_hook(lambda *_: called.append(name))
    assert torch.allclose(model(tokens[None], tokens), expected, rtol=0, atol=1e-5)
    assert called == [name]


class HalvedNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) / 2


class NoMLP(nn.Module):
    def forward(self, x):
        return x * 0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("input_layernorm", HalvedNorm(SMALL.hidden_size, 1e-5)),
        ("post_attention_layernorm", nn.LayerNorm(SMALL.hidden_size)),
        ("input_layernorm", nn.Identity()),
        ("mlp", NoMLP()),
    ],
)
def test_modules_of_users_take_the_place_of_a_blocks_own(name, other):
    """Also those that only replace the forward of an object."""
    model, tokens = CPM(SMALL).to(DEVICE), torch.arange(9, device=DEVICE)
    block, plain = model.layers[0], model(tokens[None], tokens)
    own = block.get_submodule(name)
    setattr(block, name, other.to(DEVICE))
    replaced = model(tokens[None], tokens)
    assert not torch.allclose(replaced, plain)
    setattr(block, name, own)
    own.forward = other.forward
    assert torch.allclose(model(tokens[None], tokens), replaced)
