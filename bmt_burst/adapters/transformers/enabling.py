"""The entry point for a model that is enabled by hand."""

from __future__ import annotations

from transformers import PreTrainedModel

from ...base.arguments import as_bool
from ...ranks.sequence_parallel import SequenceParallel, check_sp
from .supported import change_model, find_target
from .untested import compare_with_plain


def enable(
    model: PreTrainedModel,
    sp: SequenceParallel,
    *,
    balanced: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
    strategy: str = "auto",
    untested: bool = False,
) -> PreTrainedModel:
    """Replace the attention of `model` by attention over the ranks of `sp`, and return the model.

    balanced       lay out the sequences as Layout.balanced does for the documents of each batch,
                   not as sp says: equal work also where documents are short
    flash          the block kernel, as in burst_attn_func
    deterministic  equal bits between runs, as in burst_attn_func
    strategy       how the ranks exchange tensors, as in burst_attn_func
    untested       accept models outside the list. All ranks first compare a small copy of the
                   model, with random weights, with a plain one. It must agree within 1e-4.

    Enable a model before DDP or an Accelerator wraps it, since a wrapped model has another forward.
    In a model with another head, such as a LlamaForSequenceClassification, the model below the head
    is enabled.

    Raises TypeError if sp is not a SequenceParallel, for unknown models, for an untested one that
    does not agree, and if the forward or the attention of a model is not transformers' own, also
    where a package has replaced it in the class. Raises ValueError if its loss is not transformers'
    own, and if the model is already enabled. The model is then unchanged.
    """
    check_sp(sp)
    options = {
        "flash": flash,
        "deterministic": as_bool("deterministic", deterministic),
        "strategy": strategy,
    }
    balanced = as_bool("balanced", balanced)
    target = find_target(model, as_bool("untested", untested))
    if not target.tested:
        compare_with_plain(target, sp, balanced, options)
    change_model(model, target, sp, balanced, options)
    return model
