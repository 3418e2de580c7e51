"""Fine-tuning of a Llama of transformers: every rank has different sequences. transformers_after.py
adds sequence parallelism.

torchrun --nproc-per-node 2 examples/transformers_before.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 256, 509, 10


def sequences(step, reader, device):
    """Return the tokens of the `reader`-th reader in a step. Each token is 3 more than the last."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    first = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    return ((first + 3 * torch.arange(LENGTH)) % VOCABULARY).to(device)


def small_llama():
    """Return a stand-in for LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = small_llama().to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens = sequences(step, dist.get_rank(), device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {mean:.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
