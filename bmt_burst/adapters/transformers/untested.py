"""The comparison of a model outside the list with the plain one, before it is enabled.

All ranks make the same small copy of the model's class, in fp32 with random weights, and compare it
with an enabled copy: whole logits and all gradients, on whole rows and on packed ones. The loss
alone is no check, since layers that see only this rank's tokens change it little.

Letters: B rows, S tokens of a row.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RankGone
from ...ranks.agreement import run_together
from ...ranks.rings import Rings
from ...ranks.sequence_parallel import SequenceParallel
from ...sequence.layout import Layout
from .supported import Target, change_model

BOUND = 1e-4  # of the largest value. Models that are right differ by less than 1e-5

_HINT = "train it without sequence parallelism, or call burst_attn_func in its attention"
# The largest values of a small copy's sizes, by the ends of their names. Windows and chunks are
# shorter than the sequences, so that attention needs them.
_LARGEST = {
    r"(^|_)(windows?|window_size|chunk_size)": 7,
    r"(^|_)(intermediate_size(_mlp)?|n_inner|ffn_dim|ffn_hidden_size)": 16,
    r"(^|_)(num|n)_(local_|routed_)?experts": 32,  # groups of experts still divide it
    "vocab_size": 128,
    r"_token_(id|index)": 0,
}
_MAKING = threading.Lock()  # simulated ranks share the random state of torch


def compare_with_plain(
    target: Target, sp: SequenceParallel, balanced: bool, options: dict[str, Any]
) -> None:
    """Raise TypeError on every rank unless the target's class, enabled, equals a plain one.

    The target is not changed, and its weights are not read. The block kernel is chosen for fp32.
    """
    name = type(target.model).__name__
    if isinstance(sp.layout, Layout):  # for sequences of another length
        sp = sp.with_layout("zigzag")
    try:
        with _exact_products(), torch.device("cpu"):
            errors = _find_errors(target, sp, balanced, options | {"flash": "auto"})
    except RankGone:
        raise
    except Exception as error:
        raise TypeError(
            f"a {name} over {sp.size} ranks could not be compared with the plain one: {error}; "
            f"{_HINT}"
        ) from error
    outputs = "logits" if target.enabled.has_head else "hidden states"
    texts = [
        f"{case}: {outputs} differ by {whole:.1e}, gradients by {gradient:.1e} of the largest value"
        for case, (whole, gradient) in errors.items()
        if not (whole <= BOUND and gradient <= BOUND)  # so NaN is wrong
    ]
    if texts:
        raise TypeError(
            f"a {name} over {sp.size} ranks does not equal the plain one: {'; '.join(texts)}, and "
            f"at most {BOUND:.0e} is expected; {_HINT}"
        )


def _find_errors(
    target: Target, sp: SequenceParallel, balanced: bool, options: dict[str, Any]
) -> dict[str, list[float]]:
    """Return the errors of outputs and of gradients, by case, the same on all ranks."""
    rings, doing = sp.rings, f"the comparison of a {type(target.model).__name__} with the plain one"
    device, seq_len = _choose_device(rings), max(40, 8 * sp.size + 21)
    plain: Any = run_together(rings, doing, lambda: _make_plain(target, seq_len).to(device))
    ours = copy.deepcopy(plain, {id(p): p for p in plain.parameters()})
    change_model(ours, dataclasses.replace(target, model=ours), sp, balanced, options)
    errors = {}
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for case, inputs in _make_cases(plain, seq_len, target.enabled.has_head).items():
            run = functools.partial(_run_plain, plain, inputs)
            expected, gradient = run_together(rings, doing, run)
            forward = functools.partial(_run, ours, inputs | {"whole_outputs": True})
            whole, loss = run_together(rings, doing, forward)
            mean = sp.sum(_find_gradient(ours, loss)) / sp.size  # its backward reports its errors
            here = torch.stack([_compare(whole, expected), _compare(mean, gradient)])
            # ranks may round differently, and must come to the same verdict
            errors[case] = (sp.sum(here) / sp.size).tolist()
    return errors


def _choose_device(rings: Rings) -> torch.device:
    """Return a device with tensors that all rings can exchange."""
    if rings.shared and all("cuda" in ring.device_types for ring in rings.shared):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _make_plain(target: Target, seq_len: int) -> Any:
    """Return a small plain model with each kind of layer of the target, in fp32 on the CPU."""
    config = copy.deepcopy(target.model.config)
    config.dtype, config.return_dict, config.use_cache = torch.float32, True, False
    # transformers' own, for any dtype, documents, soft caps and sinks
    config._attn_implementation = config._experts_implementation = "eager"
    sizes = config.get_text_config(decoder=True)
    _shrink(sizes)
    if (getattr(sizes, "max_position_embeddings", None) or seq_len) < seq_len:
        sizes.max_position_embeddings = seq_len
    kinds = _find_kinds(target.model.base_model, sizes)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    model = _make_with_layers(type(target.model), config, first)
    if {*_find_kinds(model.base_model, model.config.get_text_config(decoder=True))} != {*kinds}:
        # kinds follow from the layers' numbers
        model = _make_with_layers(type(target.model), config, [*range(first[-1] + 1)])
    _draw_weights(model)
    return model.eval()


def _shrink(sizes: Any) -> None:
    """Shorten windows, and reduce sizes that attention does not depend on."""
    for name, value in [*vars(sizes).items()]:
        largest = next((n for end, n in _LARGEST.items() if re.search(f"{end}$", name)), None)
        if largest is None:
            continue
        if type(value) is int:
            setattr(sizes, name, min(value, largest))
        elif isinstance(value, list | tuple) and all(type(x) is int for x in value):
            setattr(sizes, name, type(value)(min(x, largest) for x in value))


def _find_kinds(base: nn.Module, sizes: Any) -> list[tuple[str, ...]]:
    """Return the kind of each layer: its entries in the configuration's lists, the types of its
    modules and the names of its weights.
    """
    count = sizes.num_hidden_layers
    lists = _find_lists(sizes)
    found = (x for x in base.modules() if isinstance(x, nn.ModuleList) and len(x) == count)
    return [
        (
            *(f"{name}: {entries[number]}" for name, entries in lists.items()),
            *(f"{name}: {type(part).__name__}" for name, part in layer.named_modules()),
            *(name for name, _ in layer.named_parameters()),
        )
        for number, layer in enumerate(next(found, [nn.Identity()] * count))
    ]


def _find_lists(sizes: Any) -> dict[str, Any]:
    """Return the lists of a configuration that have an entry for each layer."""
    count = sizes.num_hidden_layers
    return {
        name: entries
        for name, entries in vars(sizes).items()
        if isinstance(entries, list | tuple) and len(entries) == count
    }


def _make_with_layers(own: type, config: Any, kept: list[int]) -> Any:
    """Return a model of the class `own` with these layers of the configuration."""
    config = copy.deepcopy(config)
    sizes = config.get_text_config(decoder=True)
    for name, entries in _find_lists(sizes).items():
        setattr(sizes, name, type(entries)(entries[number] for number in kept))
    sizes.num_hidden_layers = len(kept)
    with _MAKING, torch.random.fork_rng(devices=[]):
        return own(config).float()


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Draw all weights, so that scores are far from equal and hidden states stay small."""
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() > 1:
            p.copy_(noise / max(p.shape[-2:]) ** 0.5)
        else:
            p.copy_(0.3 * noise + (not name.endswith("bias")))


def _make_cases(model: Any, seq_len: int, has_head: bool) -> dict[str, dict[str, Tensor]]:
    """Return the arguments of a forward by case: two rows, and two rows of several documents."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, vocabulary, (2, seq_len), generator=generator).to(model.device)
    lengths = ((seq_len // 3, seq_len - seq_len // 3), (5, 1, seq_len - 6))
    places = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    rows = {"input_ids": tokens}
    if has_head:
        rows["labels"] = tokens
    packed = rows | {"position_ids": torch.stack(places).to(model.device)}
    return {"rows": rows, "packed rows": packed}


def _run_plain(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits or hidden states (B, S, ...), and the gradient of all weights."""
    whole, loss = _run(model, inputs)
    return whole, _find_gradient(model, loss)


def _run(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits or hidden states (B, S, ...), without a gradient, and a loss."""
    out = model(**inputs, use_cache=False)
    if "labels" in inputs:
        return out.logits.detach(), out.loss
    hidden = out.last_hidden_state
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    return hidden.detach(), (hidden * weights.to(hidden.device)).sum()


def _find_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of all weights in one tensor."""
    weights = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, weights, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _compare(got: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference, as a part of the largest expected value."""
    return (got - expected).abs().max() / expected.abs().max()


@contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply fp32 matrices exactly, whatever the caller allows."""
    backends = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
