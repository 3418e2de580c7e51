"""Stream capture: whether a CUDA graph is being captured, and the refusal of what it cannot hold.

A graph replays the GPU's work, and nothing that the host does. Ranks agree on each call over the
host, deliveries count flags that the host numbers, and small tables are copied from host memory. A
replay would repeat old numbers and read memory that may hold something else by then.
"""

from __future__ import annotations

import torch


def refuse_capture(doing: str, why: str) -> None:
    """Raise RuntimeError if the current stream captures a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"expected no capture of a CUDA graph around {doing}, got one: {why}. Capture the "
            "parts of the model between such calls"
        )
