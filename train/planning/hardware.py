"""The GPUs that plans know, as data.

The rates of the H200 were measured: docs/planning.md says by which rows. Those of other GPUs are
the H200's, scaled by the vendors' peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """A GPU's memory, and rates that a training step reaches.

    gib             memory
    products        matrix products of a forward, in operations a second; `backward_products` those
                    of a backward
    traffic         bytes a second that other operations read and write
    attention       operations a second of a forward and a backward of dense attention, by the
                    largest head size that they hold for
    link            bytes a second between the GPU and the host's memory, each way
    update          parameters a second that AdamW updates; `host_update` those on the host
    measured        whether the rates were measured
    """

    name: str
    gib: float
    products: float
    backward_products: float
    traffic: float
    attention: Mapping[int, tuple[float, float]]
    link: float
    update: float
    host_update: float
    measured: bool = False

    def attention_rates(self, head_size: int) -> tuple[float, float]:
        """Return the rates of attention with heads of this size."""
        sizes = sorted(self.attention)
        return self.attention[next((n for n in sizes if n >= head_size), sizes[-1])]

    def scaled(self, name: str, gib: float, compute: float, bandwidth: float) -> Hardware:
        """Return another GPU, with so many times the compute and memory bandwidth."""
        return replace(
            self,
            name=name,
            gib=gib,
            products=self.products * compute,
            backward_products=self.backward_products * compute,
            traffic=self.traffic * bandwidth,
            attention={
                size: (forward * compute, backward * compute)
                for size, (forward, backward) in self.attention.items()
            },
            update=self.update * bandwidth,
            measured=False,
        )


H200 = Hardware(
    name="h200",
    gib=139.8,
    products=665e12,
    backward_products=565e12,
    traffic=2.7e12,
    attention={64: (508e12, 540e12), 128: (650e12, 605e12)},
    link=45e9,
    update=58e9,
    host_update=1e9,
    measured=True,
)

# Peaks of dense bf16 and memory bandwidths from the vendors' datasheets, relative to the H200's 989
# TFLOP/s and 4.8 TB/s.
GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        H200.scaled("h100", 79.6, 1.0, 3.35 / 4.8),
        H200.scaled("a100", 79.3, 312 / 989, 2.04 / 4.8),
        H200.scaled("l40s", 44.5, 362 / 989, 0.864 / 4.8),
        H200.scaled("rtx4090", 23.6, 165 / 989, 1.01 / 4.8),
    )
}

# Memory that a plan leaves free: CUDA, NCCL and kernels take some that torch does not count, and
# the allocator cannot use all of the rest.
_RESERVED_GIB, _RESERVED_SHARE = 1.5, 0.03


def usable_bytes(gib: float) -> int:
    """Return the bytes of a GPU that a step may use. Raises ValueError if none are left."""
    usable = (gib * (1 - _RESERVED_SHARE) - _RESERVED_GIB) * GIB
    if not 0 < usable < math.inf:
        raise ValueError(
            f"--gpu-memory must be at least {_RESERVED_GIB + 1:g} and finite, got {gib:g}"
        )
    return int(usable)
