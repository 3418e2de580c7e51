"""Engines: how a model of plain torch modules is sharded over ranks and trained. One engine a file.

torch     FSDP2 over torch.distributed: gloo on CPUs, NCCL on GPUs
bmtrain   BMTrain's ZeRO-3, on GPUs
common    the parts that both share: masters, their initial values, AdamW over them
adamw     one update of a tensor; triton_adamw has the GPU's

A model has a method `init_parameter`, and `layers_at` names its list of blocks. fp32 masters and
AdamW's state are flat shards, so a checkpoint depends on neither engine nor ranks.
"""

from .common import Engine, Shard

__all__ = ["Engine", "Shard"]
