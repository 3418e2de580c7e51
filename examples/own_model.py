"""A model of your own over ranks. docs/own-model.md explains it.

python examples/own_model.py
"""

import sys
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import nn

from bmt_burst import Cache, Chunks, Mask, SequenceParallel, shift_labels, simulate
from bmt_burst.loss import count_targets, linear_cross_entropy_sum
from bmt_burst.nn import Softmax, apply_rope, rope_tables

WIDTH, HEADS, WINDOWS = 64, 4, (None, 40)  # a window for each layer


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.kind = layer, Softmax(window=WINDOWS[layer])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin, part):
        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return x + self.out(part.mix(self.layer, self.kind, q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(len(WINDOWS)))

    def forward(self, tokens, positions, part, labels=None):
        part.check_positions(positions)
        x, (cos, sin) = self.embedding(tokens), rope_tables(positions, WIDTH // HEADS)
        for block in self.blocks:
            x = block(x, cos, sin, part)
        x = part.select(x)  # the tokens that get a result
        if labels is None:
            return self.head(x)
        return linear_cross_entropy_sum(x, self.head.weight, labels)


def train(model, sp, tokens, mask):
    batch = sp.sequence(mask)
    labels = batch.shard(batch.shift_labels(tokens))
    loss, count = model(batch.shard(tokens), batch.positions(), batch, labels)
    (loss / sp.sum(count)).backward()  # then add up the gradients of all ranks


def train_in_chunks(model, sp, tokens, mask):
    labels, positions = shift_labels(tokens, mask=mask), mask.positions()
    chunks = Chunks(mask, tokens=100, layers=len(WINDOWS), sp=sp)
    for chunk in chunks.forward():
        model(chunk.shard(tokens), chunk.shard(positions, 0), chunk)
    for chunk in chunks.backward():
        inputs = chunk.shard(tokens), chunk.shard(positions, 0), chunk, chunk.shard(labels)
        loss, _ = model(*inputs)
        (loss / count_targets(labels)).backward()


@torch.inference_mode()
def generate(model, sp, prompt, count):
    length, found = prompt.shape[1], []
    cache = Cache(sp, layers=len(WINDOWS), limit=length + count)
    for chunk in cache.prefill(length, tokens=100):
        logits = model(chunk.shard(prompt), chunk.shard(torch.arange(length), 0), chunk)
    for position in range(length, length + count):
        found.append(logits[:, -1:].argmax(-1))  # a drawn token is sent to the other ranks
        logits = model(found[-1], torch.tensor([position]), cache)
    return torch.cat(found, 1)


def main():
    torch.manual_seed(0)
    model, mask = Model(), Mask.documents((0, 110, 300))
    tokens = torch.randint(256, (1, 300))

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        train(model, sp, tokens, mask)  # these ranks are threads, and add up their gradients
        train_in_chunks(model, sp, tokens, mask)
        return generate(model, sp, tokens, 5)

    print(simulate(2, work)[0])


if __name__ == "__main__":
    main()
