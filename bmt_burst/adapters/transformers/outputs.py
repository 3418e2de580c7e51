"""The outputs of TRL's fused head, of whole sequences."""

from __future__ import annotations

from typing import Any

import torch

from ...sequence.layout import IGNORE_INDEX
from .inputs import ForwardInputs

# fields with one number for each token
_OF_TOKENS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def join_fused(out: Any, inputs: ForwardInputs) -> Any:
    """Return TRL's FusedCausalLMOutput of whole rows, from `out` of this rank's tokens.

    Its fields are (B, S) if shift_labels were given. With labels they are (B, S - 1), without the
    last token, which has no target. The loss is the sum of the negative log_probs, divided as TRL
    does.
    """
    names = [name for name in _OF_TOKENS if getattr(out, name) is not None]
    mine = [getattr(out, name) for name in names]
    # one exchange for all of them, in the dtype of log_probs
    stacked = torch.stack([x.to(mine[0].dtype) for x in mine], -1)
    whole = inputs.sequence.unshard(stacked).unbind(-1)
    targets = inputs.targets
    assert targets is not None, "checked with the arguments"
    columns = slice(None) if "shift_labels" in inputs.arguments else slice(-1)
    # copies, since autograd refuses changes in place of one of several views
    fields = {
        name: (joined if x.requires_grad else joined.detach()).to(x.dtype)[:, columns].clone()
        for name, x, joined in zip(names, mine, whole, strict=True)
    }
    mask = targets[:, columns].ne(IGNORE_INDEX).to(stacked.device)
    count = inputs.arguments.get("num_items_in_batch")
    if count is None:
        count = mask.sum().clamp(min=1)
    loss = -fields["log_probs"].sum() / count
    return type(out)(loss=loss, **fields, label_mask=mask)
