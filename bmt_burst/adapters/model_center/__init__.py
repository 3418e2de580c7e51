"""Makes models of ModelCenter 1.0.2, the package model-center, sequence parallel, in place.

    bmt.init_distributed()
    sp = bmt_burst.init_sequence_parallel(sp_size=2)
    model = model_center.enable(Llama.from_pretrained(path), sp)  # from bmt_burst.adapters import
    model_center logits = model(sp.shard(input_ids), length=length).logits  # of this rank's tokens

Llama, GPT2, GPTj, OPT, CPM1 and CPM3, which are causal, Bert and Roberta, which are not, and
subclasses that leave their forward as it is. Other models are refused, with the reason.

Parameters, their names and checkpoints stay as they are, and so does the checkpointing of layers.
An enabled model is
not pickled: its weights are what bmtrain.save writes. What changes is the model's forward: it makes
no mask of S x S, positions are those of the whole sequence, and attention goes over the ranks of
`sp`. It takes what it took, and two arguments more:

    input_ids, inputs_embeds, position_ids, token_type_ids, attention_mask
            (B, S_local, ...), this rank's part, as sp.shard cuts it
    context, span
            (B, S_local), the same, of CPM1 and CPM3
    length  (B,), the tokens of the whole rows, without the padding after them
    mask    what tokens of the whole sequence see, a Mask or one for each row, in place of length
            and attention_mask; positions begin anew in each of its documents
    layout  how the sequences of this call lie on the ranks, if not as sp says; or one for each row

Without length, attention_mask and mask there is no padding. What comes back is of this rank's
tokens. So its loss is a
share: the sum over its targets, which one rank has more of than another, divided by how many there
are on all ranks of the batch, never a mean over its own. BMTrain's OptimManager averages over
ranks, so that is times their number:

    total, count = cross_entropy_sum(logits, labels)  # of bmt_burst.loss; labels =
    sp.shard(shift_labels(input_ids)) manager.backward(bmt.world_size() * total /
    bmt.distributed.all_reduce(count, "sum"))

CPM1 and CPM3 add learned numbers to their scores, by the distance of tokens in the sequence. So
their position_ids, (B, S_local) or (S_local,), must count on between tokens that see each other.

Letters: B batch, S tokens of the whole sequence, S_local those of this rank, H heads, D head size,
E model width.
"""

from __future__ import annotations

from model_center.layer import Attention
from torch import nn

from ...ranks.groups import SequenceParallel
from .attention import _Attention
from .models import _Rotary
from .supported import _check_layer, _enabled, _family

__all__ = ["enable"]


def enable(
    model: nn.Module,
    sp: SequenceParallel,
    *,
    exact_rotary: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
) -> nn.Module:
    """Puts attention over the ranks of `sp` in the place of the model's own; returns the model.

    exact_rotary   form the angles of rotary embeddings in fp64. By default they are formed in the
                   model's dtype, as ModelCenter does: fp16 rounds positions from 2048 on, bf16 from
                   256 on, and what fp16 does not hold, positions beyond 65504, is refused
    flash          the block kernel, and
    deterministic  equal bits between runs, as of burst_attn_func

    A model of one rank works too, and generates as before. With more ranks use_cache and
    past_key_values are refused, and with any number in training dropout of the attention's
    probabilities.

    Raises TypeError for an sp that is none, for models that are not known and those that cannot be
    sequence parallel; ValueError for options that cannot, and if the model is enabled already. The
    model is then as it was.
    """
    if not isinstance(sp, SequenceParallel):
        raise TypeError(
            f"sp must be a SequenceParallel, from init_sequence_parallel, got {type(sp).__name__}"
        )
    family = _family(model)
    if exact_rotary and not issubclass(family, _Rotary):
        raise ValueError(
            f"exact_rotary is for models with rotary embeddings, which {type(model).__name__} has not"
        )
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    for layer in layers:
        _check_layer(layer, family)
    family.check(model)
    for layer in layers:
        layer._sp = sp
        layer.__class__ = _Attention
    model._sp = sp
    model._exact_rotary = exact_rotary
    model._options = {"flash": flash, "deterministic": deterministic}
    model.__class__ = _enabled(type(model), family)
    return model
