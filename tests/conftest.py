"""What must be set before CUDA starts or Triton is imported: without GPUs its kernels run in its interpreter."""

import os

import torch

# Ranks that are processes may share a GPU, if torch's symmetric memory does not mind.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
# Ranks that are threads share a GPU, whose streams may wait for each other if they share a queue: by default it has 8.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
