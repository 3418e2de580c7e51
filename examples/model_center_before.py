"""Training of ModelCenter's Llama: every rank has different sequences. model_center_after.py adds
sequence parallelism.

torchrun --nproc-per-node 2 examples/model_center_before.py
"""

import bmtrain as bmt
import torch
import torch.nn.functional as F
from model_center.model import Llama, LlamaConfig

from bmt_burst import shift_labels

VOCABULARY = 512
LENGTH, STEPS = 1024, 20


def sequences(step, reader):
    """Return the tokens of the `reader`-th reader in a step."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    return torch.randint(0, VOCABULARY, (1, 64), generator=generator).repeat(1, LENGTH // 64).cuda()


def main():
    bmt.init_distributed(seed=0)
    config = LlamaConfig(
        VOCABULARY, dim_model=256, num_heads=4, dim_head=64, dim_ff=512, num_layers=2, half=True
    )
    model = Llama(config)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager(loss_scale=1024)
    manager.add_optimizer(optimizer)
    length = torch.tensor([LENGTH], device="cuda")
    for step in range(STEPS):
        tokens = sequences(step, bmt.rank())
        labels = shift_labels(tokens)
        logits = model(tokens, length=length).logits
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
