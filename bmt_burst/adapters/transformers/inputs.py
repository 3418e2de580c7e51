"""The arguments of a forward: checks, and this rank's part of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from ...base.arguments import as_float, check_tensor
from ...calls.masking import resolve_layout
from ...calls.terms import describe_layout
from ...loss import count_targets
from ...ranks.sequence_parallel import SequenceParallel
from ...sequence.layout import IGNORE_INDEX, Layout
from ...sequence.mask import Mask, plain_mask

_OF_TOKENS = ("input_ids", "inputs_embeds")
_WHOLE = ("labels", "shift_labels", "position_ids", "attention_mask")
_COMPARED = ("input_ids", *_WHOLE, "num_items_in_batch")
_OTHERS = ("logits_to_keep", "use_cache", "output_hidden_states", "return_dict")
_KNOWN = {*_OF_TOKENS, *_COMPARED, *_OTHERS}
_WHOLE_OUTPUTS = {
    "output_attentions": "attention over ranks never has all its probabilities at once",
    "output_router_logits": "the loss of routers needs whole sequences, and these are cut over "
    "ranks",
}
_OF_ONE_DOCUMENT = ("gpt_oss",)  # models with masks that ignore position_ids


class ForwardInputs:
    """A forward's arguments, of whole sequences. Raises ValueError or TypeError if they are wrong.

    part           the arguments of the model's own forward: this rank's part of them
    terms          what the ranks compare
    masking        the mask and the layout, as options of burst_attn_func
    num_targets    the number of targets, an int64 scalar; 0 without labels
    last_position  the largest position, an int64 scalar
    """

    def __init__(
        self,
        sp: SequenceParallel,
        balanced: bool,
        config: PreTrainedConfig,
        vocabulary: int | None,
        arguments: dict[str, Any],
    ):
        _check_arguments(arguments, config)
        self.arguments = {name: x for name, x in arguments.items() if x is not None}
        self.size, self.seq_len = _check_tokens(
            {name: x for name, x in self.arguments.items() if name in _OF_TOKENS}
        )
        self._check_shapes()
        padding, places = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        documents = None if places is None else _find_documents(places, padding)
        if documents is not None and config.model_type in _OF_ONE_DOCUMENT:
            raise ValueError(
                "position_ids start again, but transformers does not keep documents of a "
                f"{config.model_type} apart"
            )
        masks = documents or (plain_mask(self.seq_len),)
        self._layouts = _choose_layouts(sp, balanced, masks, self.seq_len)
        self._rank, targets = sp.rank, self._targets()
        if padding is not None:
            _check_padding(padding, targets)
        self.num_targets: Tensor | int = 0 if targets is None else count_targets(targets)
        self.part = self._shard_arguments(targets)
        self.last_position = torch.tensor(self.seq_len - 1) if places is None else places.amax()
        # balanced layouts follow from the position_ids
        layout = "balanced" if balanced else describe_layout(sp.layout_of(self.seq_len))
        self.terms = self._describe(vocabulary, layout)
        of_rows = masks * (self.size // len(masks))
        self.masking = {"mask": of_rows, "layout": self._layouts}

    def _check_shapes(self) -> None:
        whole = (self.size, self.seq_len)
        for name in _WHOLE:
            x = self.arguments.get(name)
            if x is None:
                continue
            check_tensor(name, x)
            expected = [whole, (1, self.seq_len)] if name == "position_ids" else [whole]
            if tuple(x.shape) not in expected:
                texts, hint = " or ".join(map(str, dict.fromkeys(expected))), ""
                if name == "position_ids" and x.dim() > 2:
                    hint = ": positions of several axes, as of multimodal models, are not supported"
                raise ValueError(
                    f"{name} must be of whole sequences, {texts}, got shape {tuple(x.shape)}{hint}"
                )

    def _targets(self) -> Tensor | None:
        """Return targets (B, S). As in transformers, labels are shifted within each row, but across
        documents.
        """
        labels = self.arguments.get("labels")
        if labels is None or "shift_labels" in self.arguments:
            return None if labels is None else self.arguments["shift_labels"]
        return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)

    def _shard_arguments(self, targets: Tensor | None) -> dict[str, Any]:
        unneeded = ("attention_mask", "shift_labels", "logits_to_keep")
        part = {name: x for name, x in self.arguments.items() if name not in unneeded}
        part["use_cache"] = False
        name = next(name for name in _OF_TOKENS if name in part)
        part[name] = self._shard_rows(part[name])
        if "position_ids" not in part:
            whole = torch.arange(self.seq_len, device=part[name].device)
            part["position_ids"] = whole.unsqueeze(0)
        part["position_ids"] = self._shard_rows(part["position_ids"])
        return part if targets is None else part | {"labels": self._shard_rows(targets)}

    def _shard_rows(self, x: Tensor) -> Tensor:
        """Return this rank's part of x (B, S, ...) or (1, S)."""
        if isinstance(self._layouts, Layout):
            return self._layouts.shard(x, self._rank, 1)
        pairs = zip(self._layouts, x.expand(self.size, *x.shape[1:]), strict=True)
        return torch.stack([row.shard(y, self._rank, 0) for row, y in pairs])

    def _describe(self, vocabulary: int | None, layout: str) -> dict[str, Any]:
        """Return the terms that ranks compare. Raises ValueError for tokens outside the vocabulary,
        in any rank's part.
        """
        terms: dict[str, Any] = {"arguments": sorted(self.arguments)}
        for name in ("inputs_embeds", *_COMPARED):
            x = self.arguments.get(name)
            if x is None:
                continue
            if name == "inputs_embeds":
                described = f"{tuple(x.shape)}, {x.dtype}"
            elif name == "num_items_in_batch":
                described = _format_number(name, x)
            else:
                described = _digest(x, vocabulary if name == "input_ids" else None)
            terms[f"{name} (whole, identical on every rank)"] = described
        return terms | {"layout": layout, "tokens": self.part["position_ids"].shape[1]}


def _check_arguments(arguments: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise ValueError for arguments that are not supported for a part of a sequence."""
    if arguments.get("use_cache") or arguments.get("past_key_values") is not None:
        raise ValueError(
            "use_cache and past_key_values need whole sequences, and these are cut over ranks: "
            "leave them out, or generate with a model that is not enabled"
        )
    for name, reason in _WHOLE_OUTPUTS.items():
        if arguments.pop(name, None) or getattr(config, name, False):
            raise ValueError(
                f"{name}: {reason}; leave it out, or set it to False in the configuration"
            )
    for name, both_sides in (("is_causal", False), ("use_bidirectional_attention", True)):
        if getattr(config, name, not both_sides) == both_sides:
            raise ValueError(
                f"{name} is {both_sides} in the configuration: attention to both sides is not "
                "supported"
            )
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ValueError(
            "logits_to_keep counts tokens of whole sequences, and these are cut over ranks: "
            f"expected 0, got {keep}; to skip tokens in the loss, make their labels {IGNORE_INDEX}"
        )
    given = {name for name, x in arguments.items() if x is not None}
    if unknown := sorted(given - _KNOWN):
        raise ValueError(
            f"{' and '.join(unknown)}: cannot cut an unknown argument over ranks; to separate "
            "documents, pass position_ids that start again"
        )


def _check_tokens(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Return B and S. Raises ValueError or TypeError for wrong tokens."""
    if len(tensors) != 1:
        raise ValueError(
            f"expected either input_ids or inputs_embeds, got {' and '.join(tensors) or 'neither'}"
        )
    [(name, x)] = tensors.items()
    check_tensor(name, x)
    if x.dim() != (2 if name == "input_ids" else 3) or 0 in x.shape:
        raise ValueError(
            f"{name} must be (B, S{', E' * (name != 'input_ids')}), got shape {tuple(x.shape)}"
        )
    if name == "input_ids" and x.dtype not in (torch.int64, torch.int32):  # as embeddings need
        raise TypeError(f"input_ids must be int64 or int32, got {x.dtype}")
    return x.shape[0], x.shape[1]


def _find_documents(places: Tensor, padding: Tensor | None) -> tuple[Mask, ...] | None:
    """Return the mask of each row of position_ids. None if each row is one document."""
    begins = places.diff(dim=-1).ne(1)
    if padding is not None:
        if (begins & padding[:, 1:].ne(0)).any():
            raise ValueError(
                "position_ids start again where attention_mask has no padding: with an "
                "attention_mask transformers does not keep documents apart; leave it out"
            )
        return None
    starts: list[list[int]] = [[0] for _ in places]
    for row, place in begins.nonzero().tolist():
        starts[row].append(place + 1)
    if all(len(row) == 1 for row in starts):
        return None
    return tuple(Mask.documents((*row, places.shape[1])) for row in starts)


def _choose_layouts(
    sp: SequenceParallel, balanced: bool, masks: tuple[Mask, ...], seq_len: int
) -> Layout | list[Layout]:
    """Return the layout of all rows, or one for each. `masks` has one mask for all or for each."""
    if not balanced:
        return sp.layout_of(seq_len)
    layouts = [resolve_layout("balanced", mask, sp.size) for mask in masks]
    return layouts[0] if len(layouts) == 1 else layouts


def _check_padding(padding: Tensor, targets: Tensor | None) -> None:
    """Raise ValueError unless padding is at the end of rows, without targets."""
    valid = padding.ne(0)
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise ValueError(
            "attention_mask has padding before other tokens: rows must be padded on the right, as "
            "by a tokenizer with padding_side='right'"
        )
    if targets is not None and (targets.to(valid.device).ne(IGNORE_INDEX) & ~valid).any():
        raise ValueError(f"labels must be {IGNORE_INDEX} where attention_mask is 0")


def _format_number(name: str, x: Any) -> str:
    """Format a number, or a tensor of one element, for which the host waits. 10, 10.0 and
    tensor(10) give the same text.
    """
    if isinstance(x, Tensor):
        check_tensor(name, x)
        if x.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(x.shape)}")
        x = x.item()
    number = as_float(name, x)
    return str(int(number)) if number.is_integer() else repr(number)


def _digest(x: Tensor, vocabulary: int | None = None) -> str:
    """Describe shape and contents. The host waits for it once. Raises ValueError for a token
    outside a vocabulary.
    """
    numbers = x.flatten()
    bits = numbers.double().view(torch.int64) if x.is_floating_point() else numbers.long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 0x2545F4914F6CDD1D  # wraps around
    mixed = (bits + 1) * (weights ^ (weights >> 29))
    digest, least, largest = torch.stack([(mixed ^ (mixed >> 32)).sum(), *bits.aminmax()]).tolist()
    if vocabulary is not None and not 0 <= least <= largest < vocabulary:
        token = least if least < 0 else largest
        raise ValueError(f"token {token} of input_ids is not in a vocabulary of {vocabulary}")
    return f"{tuple(x.shape)}, digest {digest % (1 << 64):016x}"
