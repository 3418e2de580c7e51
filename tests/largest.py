"""How large the largest tensor is that a piece of code makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the entries of the largest tensor, of one dtype or of all, that is made within."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype, self.entries = dtype, 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and self.dtype in (None, x.dtype):
                self.entries = max(self.entries, x.numel())
        return result
