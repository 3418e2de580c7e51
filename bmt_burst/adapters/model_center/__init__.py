"""Sequence parallel models of ModelCenter 1.0.2, the package model-center, changed in place.

    from bmt_burst.adapters import model_center

    bmt.init_distributed()
    sp = bmt_burst.init_sequence_parallel(sp_size=2)
    model = model_center.enable(Llama.from_pretrained(path), sp)
    logits = model(sp.shard(input_ids), length=length).logits  # of this rank's tokens

docs/model-center.md lists the models, and says what they see. An enabled model cannot be pickled:
save its weights, with bmtrain.save. Its forward takes its own arguments and two more:

    input_ids, inputs_embeds, position_ids, token_type_ids, attention_mask
            (B, S_local, ...), this rank's part, as sp.shard cuts it
    context, span
            (B, S_local), the same, of CPM1 and CPM3
    length  (B,), the tokens of the whole rows, without the padding after them
    mask    the visible pairs of the whole sequence, instead of length and attention_mask: a Mask,
            or one for each row. Positions start again in each of its documents
    layout  the layout of this call's sequences on the ranks, by default sp's; or one for each row

Without length, attention_mask and mask no token is padding. Ranks have different numbers of
targets, so never take the mean over this rank's. BMTrain's OptimManager averages over ranks:

    # cross_entropy_sum is in bmt_burst.loss; labels = sp.shard(shift_labels(input_ids))
    total, count = cross_entropy_sum(logits, labels)
    loss = bmt.world_size() * total / bmt.distributed.all_reduce(count, "sum")
    manager.backward(loss)

Letters: B batch, S tokens of the whole sequence, S_local tokens of this rank, H heads, D head size,
E model width.
"""

from __future__ import annotations

from typing import Any

import model_center.model as zoo
from model_center.layer import Attention
from torch import nn

from ...ranks.sequence_parallel import SequenceParallel, check_sp
from ..enabling import find_base, put_before
from . import models
from .biased import CPM1, CPM3

__all__ = ["enable"]

_MASKED = -1e4  # softmax makes 0 of this score
_FAMILIES: dict[type[nn.Module], type[models.EnabledModel]] = {
    zoo.Llama: models.Llama,
    zoo.GPTj: models.GPTj,
    zoo.GPT2: models.LearnedPositionModel,
    zoo.OPT: models.OPT,
    zoo.Bert: models.Bert,
    zoo.Roberta: models.Roberta,
    zoo.CPM1: CPM1,
    zoo.CPM3: CPM3,
}
_REFUSED = {
    "CPM2": "its decoder attends to another sequence",
    "T5": "its decoder attends to another sequence",
    "GLM": "it reads its prefix and its positions off the whole input",
    "Longformer": "its attention is sparse, over chunks of a sequence that it pads",
    "ViT": "it makes its sequence inside, from an image",
}


def enable(
    model: nn.Module,
    sp: SequenceParallel,
    *,
    exact_rotary: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
) -> nn.Module:
    """Replace the attention of `model` by attention over the ranks of `sp`, and return the model.

    exact_rotary   compute the angles of rotary embeddings in fp64. By default they are computed in
                   the model's dtype, as in ModelCenter: fp16 rounds positions from 2048 on, and
                   bf16 from 256 on. fp16 cannot hold positions beyond 65504: they are refused
    flash          the block kernel, as in burst_attn_func
    deterministic  equal bits between runs, as in burst_attn_func

    A model for one rank works too, and generates as before. With more ranks, use_cache and
    past_key_values are refused. Dropout of attention probabilities in training is always refused.

    Raises TypeError if sp is not a SequenceParallel, and for unknown models and models that cannot
    be sequence parallel. Raises ValueError for unsupported options of a model, and if the model is
    already enabled. The model is then unchanged.
    """
    check_sp(sp)
    family = _find_family(model)
    if exact_rotary and not issubclass(family, models.RotaryModel):
        raise ValueError(
            f"exact_rotary needs a model with rotary embeddings, got a {type(model).__name__}"
        )
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    for layer in layers:
        _check_layer(layer, family)
    family.check(model)
    for layer in layers:
        layer._sp = sp
        layer.__class__ = models.RingAttention
    model.__class__ = put_before(family, type(model))
    assert isinstance(model, models.EnabledModel)
    model._sp, model._exact_rotary = sp, exact_rotary
    model._options = {"flash": flash, "deterministic": deterministic}
    return model


def _find_family(model: Any) -> type[models.EnabledModel]:
    """Return the class that enables `model`. Raises ValueError or TypeError if none can."""
    base = find_base(model, models.EnabledModel, _FAMILIES, _REFUSED, "ModelCenter's")
    if type(model).forward is not base.forward or "forward" in vars(model):
        raise TypeError(
            f"this {type(model).__name__} overrides the forward of {base.__name__}, which would "
            "be lost"
        )
    return _FAMILIES[base]


def _check_layer(layer: Attention, family: type[models.EnabledModel]) -> None:
    """Raise TypeError or ValueError if the attention of this layer cannot be replaced."""
    if type(layer) is not Attention or "forward" in vars(layer):
        raise TypeError(
            "a layer overrides the forward of Attention, which would be lost: "
            f"{type(layer).__name__}"
        )
    if layer.pos_bias_type not in family.pos_bias_types:
        expected = " or ".join(map(repr, family.pos_bias_types))
        raise ValueError(
            f"pos_bias_type must be {expected} in this model, got {layer.pos_bias_type!r}"
        )
    if layer.mask_value > _MASKED:
        raise ValueError(
            f"att_mask_value must be {_MASKED} or less, so that tokens do not see what is masked, "
            f"got {layer.mask_value}"
        )
