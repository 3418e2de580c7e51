"""A plain BMTrain training loop: every rank has different sequences. bmtrain_after.py adds sequence
parallelism.

torchrun --nproc-per-node 2 examples/bmtrain_before.py
"""

import bmtrain as bmt
import torch
import torch.nn.functional as F

from bmt_burst import shift_labels
from bmt_burst.nn import apply_rope, rope_tables

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, STEPS = 512, 256, 4, 2, 1024, 20
DTYPE = torch.bfloat16

bmt.init_distributed(seed=0)


class Layer(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.project_qkv = bmt.nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=DTYPE)
        self.project_out = bmt.nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE)
        self.up = bmt.nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=DTYPE)
        self.down = bmt.nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=DTYPE)

    def attend(self, x, cos, sin):
        q, k, v = self.project_qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.project_out(out.flatten(2))

    def forward(self, x, cos, sin):
        x = x + self.attend(F.layer_norm(x, (WIDTH,)), cos, sin)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


class Model(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        start = torch.randn(VOCABULARY, WIDTH, dtype=DTYPE) * 0.02
        self.embedding = bmt.DistributedParameter(start)
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])

    def forward(self, tokens, positions):
        cos, sin = rope_tables(positions, WIDTH // HEADS)
        embedding = self.embedding
        x = self.layers(F.embedding(tokens, embedding), cos, sin)
        return F.linear(F.layer_norm(x, (WIDTH,)), embedding)


def sequences(step, reader):
    """Return the tokens of the `reader`-th reader in a step."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    return torch.randint(0, VOCABULARY, (1, 64), generator=generator).repeat(1, LENGTH // 64).cuda()


def main():
    model = Model()
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(STEPS):
        tokens = sequences(step, bmt.rank())
        labels = shift_labels(tokens)
        positions = torch.arange(LENGTH, device="cuda")
        logits = model(tokens, positions)
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        count = bmt.distributed.all_reduce((labels >= 0).sum(), "sum")
        manager.zero_grad()
        manager.backward(bmt.world_size() * total / count)
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        loss = bmt.distributed.all_reduce(total.detach(), "sum") / count
        bmt.print_rank(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.4f}")


if __name__ == "__main__":
    main()
