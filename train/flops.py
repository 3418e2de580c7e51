"""Floating-point operations of a training step, and what a device could do: for model FLOP utilization (MFU)."""

from __future__ import annotations

import torch

from models.config import CPMConfig

# Dense 16-bit TFLOP/s by the vendors' datasheets: for the first entry whose words are all in the device's name.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200 NVL": 835.0,
    "H20": 148.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "B100": 1800.0,
    "A100": 312.0,
    "A800": 312.0,
}


def step_flops(model: CPMConfig, seq_len: int, sequences: int) -> float:
    """Operations of forward and backward over `sequences`, without what is computed a second time.

    Per token: 6 for each entry of a matrix that it is multiplied with (2 forward, 4 backward), and for attention
    6 * layers * heads * head_dim * seq_len: that is 12 as in PaLM (arXiv 2204.02311, appendix B), halved since a causal
    mask hides half of the pairs.
    """
    norms = model.hidden_size * (2 * model.num_layers + 1)
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    weights = model.num_parameters - norms - looked_up
    attention = model.num_layers * model.num_heads * model.head_dim * seq_len
    return 6.0 * (weights + attention) * seq_len * sequences


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What a device can do in 16 bits, TFLOP/s; None if it is not known."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    return next((peak for name, peak in _PEAK_TFLOPS.items() if words.issuperset(name.split())), None)
