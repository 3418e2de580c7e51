"""Sequence parallel causal language models of transformers 5, changed in place.

    from bmt_burst.adapters.transformers import enable

    sp = bmt_burst.init_sequence_parallel(sp_size=2)  # after dist.init_process_group
    model = enable(LlamaForCausalLM.from_pretrained(path), sp)
    # whole sequences, identical on every rank of sp
    model(input_ids=tokens, labels=tokens).loss.backward()

docs/attention.md lists the models, and says what loss, gradients, documents and padding mean. A
forward takes its own arguments, of whole sequences, and cuts them itself:

    input_ids, inputs_embeds, labels, shift_labels
                        (B, S, ...)
    position_ids        (B, S) or (1, S). A document begins where they do not rise by one
    attention_mask      (B, S), 0 where a row is padded, on the right only
    num_items_in_batch  divides the sum of the losses, instead of the number of targets: a number or
                        a tensor of one element

Logits and hidden states belong to this rank's tokens, as sp.shard cuts them. Parameters, their
names, checkpoints and gradient checkpointing do not change. Copies and pickles of an enabled model
are enabled too. Call attach(sp) of a model that was read from a pickle. save_pretrained writes a
plain model.

Letters: B batch, S tokens of the whole sequence, S_local tokens of this rank, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from ...base.arguments import as_bool
from ...ranks.sequence_parallel import SequenceParallel
from ..enabling import check_sp, put_before
from .attention import ATTENTION
from .configs import give_own_configs
from .model import EnabledModel, EnabledRotary
from .supported import check_model

__all__ = ["ATTENTION", "enable"]

# rotary embeddings with angles that depend on the longest sequence
_BY_LENGTH = ("dynamic", "longrope")


def enable(
    model: PreTrainedModel,
    sp: SequenceParallel,
    *,
    balanced: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
) -> PreTrainedModel:
    """Replace the attention of `model` by attention over the ranks of `sp`, and return the model.

    balanced       lay out the sequences as Layout.balanced does for the documents of each batch,
                   not as sp says: equal work also where documents are short
    flash          the block kernel, as in burst_attn_func
    deterministic  equal bits between runs, as in burst_attn_func

    Enable a model before DDP or an Accelerator wraps it, since a wrapped model has another forward.

    Raises TypeError if sp is not a SequenceParallel, for unknown models, and if the forward or the
    attention of a model is not transformers' own, also where a package has replaced it in the
    class. Raises ValueError if its loss is not transformers' own, and if the model is already
    enabled. The model is then unchanged.
    """
    check_sp(sp)
    options = {"flash": flash, "deterministic": as_bool("deterministic", deterministic)}
    balanced = as_bool("balanced", balanced)
    check_model(model)
    give_own_configs(model)
    for part in model.modules():
        if getattr(part, "rope_type", None) in _BY_LENGTH:
            part.__class__ = put_before(EnabledRotary, type(part))
    changed: object = model
    changed.__class__ = put_before(EnabledModel, type(model))
    assert isinstance(changed, EnabledModel)
    changed._sp, changed._balanced, changed._options = sp, balanced, options
    return model
