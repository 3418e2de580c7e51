"""What must be set before CUDA starts or Triton is imported: without GPUs its kernels run in its interpreter."""

import os

import torch

# Ranks that are processes may share a GPU, if torch's symmetric memory does not mind.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
