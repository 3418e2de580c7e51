"""Sequence parallel models and trainers of transformers 5, accelerate and TRL.

    from bmt_burst.adapters.transformers import enable, sequence_parallel

    # one line for a Trainer, a TRL trainer or an accelerate loop: docs/trainers.md
    trainer = sequence_parallel(SFTTrainer, sp_size=8)(model=path, args=..., train_dataset=data)

    # by hand: a model is changed in place
    sp = bmt_burst.init_sequence_parallel(sp_size=2)  # after dist.init_process_group
    model = enable(LlamaForCausalLM.from_pretrained(path), sp)
    # whole sequences, identical on every rank of sp
    model(input_ids=tokens, labels=tokens).loss.backward()

docs/transformers.md lists the models, and says what loss, gradients, outputs, documents and padding
mean. A forward takes its own arguments, of whole sequences, and cuts them itself:

    input_ids, inputs_embeds, labels, shift_labels
                        (B, S, ...)
    position_ids        (B, S) or (1, S). A document begins where they fall back
    attention_mask      (B, S), 0 where a row is padded, else 1 or the number of a document
    mask                a Mask of all rows, such as that of `fold_prefixes`, instead of documents.
                        Positions are its own unless position_ids are given. Targets are
                        shift_labels
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx
                        the documents of one row, as TRL's collator sends them
    num_items_in_batch  divides the sum of the losses, instead of the number of targets: a number or
                        a tensor of one element
    label_smoothing     the part of each target that is spread over the vocabulary
    loss_only           True to leave out the logits, which mixed precision would copy in fp32
    whole_outputs       True for whole logits and hidden states, (B, S, ...) on every rank, in the
                        order of the input
    fused_lm_head       True for the outputs of TRL's fused head, of whole sequences

Parameters, their names, checkpoints and gradient checkpointing do not change. Copies and pickles of
an enabled model are enabled too. Call attach(sp) of a model that was read from a pickle.
save_pretrained writes a plain model.

Letters: B batch, S tokens of the whole sequence, S_local tokens of this rank, H query heads, G kv
heads, D head size.
"""

from .configs import ATTENTION
from .enabling import enable
from .trainers.models import plain
from .trainers.switch import sequence_parallel

__all__ = ["ATTENTION", "enable", "plain", "sequence_parallel"]
