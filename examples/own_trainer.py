"""A trainer around CPM without the code of train/. docs/own-trainer.md explains it.

torchrun --nproc-per-node 2 examples/own_trainer.py README.md own.pt 20
"""

import os
import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist

from bmt_burst import Mask, SequenceParallel, init_sequence_parallel, shift_labels
from models.config import PRESETS
from models.cpm import CPM

rows, length = 2, 512
text, checkpoint, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sp = SequenceParallel()  # this rank is alone
if "RANK" in os.environ:
    dist.init_process_group("gloo")  # on GPUs "nccl", a device for each rank, and .to(device)
    sp = init_sequence_parallel(dist.get_world_size())

model = CPM(PRESETS["cpm-tiny"], sp)
generator = torch.Generator().manual_seed(0)  # all ranks begin with the same weights
for name, parameter in model.named_parameters():
    model.init_parameter(name, parameter.data, generator)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
begin = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]

data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
for step in range(begin, steps):
    starts = [(step * rows + row) * length % (len(data) - length) for row in range(rows)]
    tokens = torch.stack([data[start : start + length] for start in starts])
    masks = [Mask.documents((0, 100, length))] * rows  # where the documents of each row end
    batch = sp.sequence(masks)
    labels = batch.shard(shift_labels(tokens, mask=masks))
    loss, count = model(batch.shard(tokens), batch.positions(), labels, cache=batch)
    targets = sp.sum(count)
    (loss / targets).backward()
    for parameter in model.parameters() if sp.size > 1 else ():
        if parameter.grad is not None:  # some may be frozen
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    mean = sp.sum(loss.detach()) / targets
    if sp.rank == 0:
        print(f"step {step + 1}: loss {mean:.4f}", flush=True)

if sp.rank == 0:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"step": steps}, checkpoint)
