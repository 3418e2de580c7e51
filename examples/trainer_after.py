"""The fine-tuning of trainer_before.py with sequence parallelism: all processes share each
sequence.

NCCL_LAUNCH_ORDER_IMPLICIT=1 torchrun --nproc-per-node 2 examples/trainer_after.py

GPUs need the environment variable, which lets NCCL run several communicators at once.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from bmt_burst.adapters.transformers import sequence_parallel

VOCABULARY, LENGTH, STEPS = 256, 509, 10


def sequences():
    """Return rows of tokens. Each token is 3 more than the last."""
    rows = [(first + 3 * torch.arange(LENGTH)) % VOCABULARY for first in range(4 * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def small_llama():
    """Return a stand-in for LlamaForCausalLM.from_pretrained(...)."""
    set_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def main():
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=2,
            learning_rate=3e-3,
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        )
        trainer = sequence_parallel(Trainer)(
            model=small_llama(), args=arguments, train_dataset=sequences()
        )
        trainer.train()
        trainer.end()


if __name__ == "__main__":
    main()
