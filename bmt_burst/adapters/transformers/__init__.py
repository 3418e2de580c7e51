"""Makes causal language models of transformers 5 sequence parallel, in place.

    sp = bmt_burst.init_sequence_parallel(sp_size=2)  # after dist.init_process_group
    model = enable(LlamaForCausalLM.from_pretrained(path), sp)  # from
    bmt_burst.adapters.transformers import enable
    model(input_ids=tokens, labels=tokens).loss.backward()  # whole sequences, the same on every
                                                            rank of sp

Llama, Mistral, Qwen2, Qwen3, Phi3, MiniCPM3, Gemma2 and GptOss, and subclasses that leave their
forward as it is. Other models are refused, with the reason.

A forward takes what it took, of whole sequences, and cuts it itself:

    input_ids, inputs_embeds, labels, shift_labels
            (B, S, ...); of integers ranks compare a digest, since unlike sequences would train and
            say nothing
    position_ids
            (B, S) or (1, S). Where they do not go on by one a document begins, which sees nothing
            of those before it. In GptOss they must go on, since transformers would let documents
            see each other there
    attention_mask
            (B, S), 0 where a row is padded, on the right only. What a model returns of padding is
            of no use, and its labels must be -100. With it position_ids may not begin anew:
            transformers ignores that then
    num_items_in_batch
            what the sum of the losses is divided by, in place of the number of targets: a number or
            a tensor of one

What comes back is of this rank's tokens, as sp.shard cuts them: logits and hidden states. The loss
is that of the whole sequences, the same on every rank of sp. Its gradients are such that their mean
over the ranks of sp is the gradient of
the loss: DDP and FSDP, which average over all ranks, need nothing else, and the ranks of one sp
count for them as one process with its own sequences would.

Parameters, their names and checkpoints stay as they are, as do gradient checkpointing and the
windows that a configuration has. Copies and pickles of an enabled model are enabled too;
save_pretrained writes a plain one.

Letters: B batch, S tokens of the whole sequence, S_local those of this rank, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from ...base.arguments import as_bool
from ...ranks.groups import SequenceParallel
from .attention import ATTENTION
from .configs import _give_own_configs
from .model import _enabled, _Model, _Rotary
from .supported import _check_model

__all__ = ["ATTENTION", "enable"]

# rotary embeddings whose angles depend on the longest sequence
_BY_LENGTH = ("dynamic", "longrope")


def enable(
    model: PreTrainedModel,
    sp: SequenceParallel,
    *,
    balanced: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
) -> PreTrainedModel:
    """Puts attention over the ranks of `sp` in the place of the model's own; returns the model.

    balanced       lay the sequences on the ranks as Layout.balanced does for the documents of each
                   batch, not as sp says: equal work also where documents are short
    flash          the block kernel, and
    deterministic  equal bits between runs, as of burst_attn_func

    Enable a model before it is wrapped, by DDP or an Accelerator, as what is wrapped has another
    forward.

    Raises TypeError for an sp that is none, and for models that are not known or whose forward or
    attention is not transformers' own, also where a package has replaced it in the class;
    ValueError for a loss that is not, and if the model is enabled already. The model is then as it
    was.
    """
    if not isinstance(sp, SequenceParallel):
        raise TypeError(
            f"sp must be a SequenceParallel, from init_sequence_parallel, got {type(sp).__name__}"
        )
    options = {"flash": flash, "deterministic": as_bool("deterministic", deterministic)}
    balanced = as_bool("balanced", balanced)
    _check_model(model)
    _give_own_configs(model)
    for part in model.modules():
        if getattr(part, "rope_type", None) in _BY_LENGTH:
            part.__class__ = _enabled(_Rotary, type(part))
    model._sp, model._balanced, model._options = sp, balanced, options
    model.__class__ = _enabled(_Model, type(model))
    return model
