"""Float8 products of the blocks' linear layers (--fp8), by torchao's training recipe "rowwise".

A product rounds both of its inputs to e4m3, with a scale for each row and each column. Its result,
the weights and their gradients keep bf16. The parts of a block around its attention are compiled:
otherwise the casts take longer than the products save.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from bmt_burst import kernels
from models.config import CPMConfig
from train.engine.common import layers_name

MULTIPLE = 16  # of all sizes of a product
_LEAST_CAPABILITY = (8, 9)


def check_device(device: torch.device) -> None:
    """Raise ValueError unless this process can multiply in float8 on `device`."""
    if device.type != "cuda":
        raise ValueError(
            "--fp8 needs a GPU for each process, of compute capability 8.9 or newer, such as H100 "
            "or H200; leave it out to train on CPUs"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise ValueError(
            f"--fp8 needs a GPU of compute capability 8.9 or newer, such as H100 or H200; {name} "
            f"has {version}"
        )
    if not kernels.installed("torchao"):
        raise ValueError("--fp8 needs the package torchao: pip install 'bmt_burst[fp8]'")


def check_model(model: CPMConfig) -> None:
    """Raise ValueError if none of the model's layers is faster in float8."""
    width, inner = model.hidden_size, model.intermediate_size
    heads = model.num_heads * model.head_dim
    shapes = [(heads, width), (inner, width)]
    if not any(pays(*shape) or pays(*reversed(shape)) for shape in shapes):
        raise ValueError(
            "none of its linear layers is large enough to gain from it and has sizes that are "
            f"multiples of {MULTIPLE}: hidden_size is {width}, intermediate_size is {inner}"
        )


def pays(out_features: int, in_features: int) -> bool:
    """Whether a linear layer is faster in float8. The limits are torchao's for H100, by its table
    of measured layers (torchao/float8/README.md).
    """
    if out_features % MULTIPLE or in_features % MULTIPLE:
        return False
    large = out_features > 2048 and in_features > 1024
    return large and (out_features > 4096 or in_features > 2048)


def convert(model: nn.Module, *, emulate: bool = False, backend: str = "inductor") -> str:
    """Let the blocks' linear layers that gain from it multiply in float8. Return a description.

    model    a dense CPM, on any device. Its parameters stay as they are, with their names
    emulate  multiply rounded inputs in fp32, for devices without float8
    backend  that of torch.compile
    """
    float8: Any = importlib.import_module("torchao.float8")
    blocks: Any = model.get_submodule(layers_name(model))
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    # On an H100 this takes 12 % less time for a layer's step. Errors of gradients over 16K tokens
    # stay within 0.5 % of those with torchao's slower sums, which rounding to e4m3 makes.
    fast = float8.Float8GemmConfig(use_fast_accum=True)
    sums = {"gemm_config_grad_input": fast, "gemm_config_grad_weight": fast}
    config = dataclasses.replace(recipe, emulate=emulate, **sums)
    float8.convert_to_float8_training(blocks, module_filter_fn=_is_converted, config=config)
    for block in blocks:
        # Tokens of a run are constant, and kernels for constant sizes are faster.
        block.compile_parts(fullgraph=True, dynamic=False, backend=backend)
    linear = [(n.split(".")[-1], m) for n, m in blocks.named_modules() if isinstance(m, nn.Linear)]
    fast = dict.fromkeys(name for name, layer in linear if type(layer) is not nn.Linear)
    return (
        f"fp8: {', '.join(fast)} multiply in float8; layers that would not gain from it, "
        "embeddings and head in bf16; the first step compiles"
    )


def _is_converted(layer: nn.Module, name: str) -> bool:
    return isinstance(layer, nn.Linear) and pays(layer.out_features, layer.in_features)
