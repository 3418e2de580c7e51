"""The imports of the process that ranks are forked from: seconds, which all of them share."""

import atexit
import contextlib
import gc

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import PIL.Image
import torch._dynamo  # noqa: F401 - torch imports it when attention is first differentiated

import tests.launcher  # noqa: F401
import train.engine.torch
import train.pretrain  # noqa: F401
from bmt_burst import strategies

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

PIL.Image.preinit()
for name in strategies.names():
    strategies.load(name)

# A collection in a rank would visit, and so copy, the memory of all these objects.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or Triton's classes would be reported as leaked
