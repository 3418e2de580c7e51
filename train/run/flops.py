"""Floating-point operations of a training step, and the peak of a device, for the MFU."""

from __future__ import annotations

import torch

from models.config import CPMConfig
from models.cpm_live.config import LiveConfig

# Dense 16-bit TFLOP/s from the vendors' datasheets. The first entry is used that has all of its
# words in the device's name.
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


def step_flops(model: CPMConfig | LiveConfig, tokens: int, pairs: float) -> float:
    """Return the operations of forward and backward over `tokens`, without recomputation.

    Each token costs 6 operations for each entry of a matrix that multiplies it: 2 in the forward
    and 4 in the backward. Norms, biases and other elementwise operations count nothing.

    Attention costs 12 * heads * head_dim for each visible pair of a query and a key: two products
    of 2 * head_dim operations in the forward and four in the backward. `pairs` is the sum of
    visible pairs over all layers with attention. A causal layer has seq_len * (seq_len + 1) / 2
    pairs for each sequence, and fewer with documents, windows and sparse attention (`sparse_keys`).
    PaLM (arXiv 2204.02311, appendix B) counts all pairs instead.
    """
    return 6.0 * model.num_multiplied * tokens + 12.0 * model.num_heads * model.head_dim * pairs


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the 16-bit peak of a device in TFLOP/s, or None if it is not known."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    return next(
        (peak for name, peak in _PEAK_TFLOPS.items() if words.issuperset(name.split())), None
    )
