"""The arguments of a forward: checks, and this rank's part of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedConfig,
)

from ...base.arguments import as_float, check_tensor
from ...calls.masking import balanced_layout
from ...loss import count_targets
from ...ranks.groups import SequenceParallel
from ...sequence.layout import IGNORE_INDEX, Layout
from ...sequence.mask import Mask
from ..batch import Given
from .attention import _MOST_MASKS, _causal

_OF_TOKENS = ("input_ids", "inputs_embeds")


_COMPARED = (
    "input_ids",
    "labels",
    "shift_labels",
    "position_ids",
    "attention_mask",
    "num_items_in_batch",
)


_KNOWN = {
    *_OF_TOKENS,
    *_COMPARED,
    "logits_to_keep",
    "use_cache",
    "output_hidden_states",
    "return_dict",
}


_OF_ONE_DOCUMENT = ("gpt_oss",)  # models whose masks do not know position_ids


class _Call:
    """A forward's arguments, of whole sequences. Raises ValueError or TypeError if they are wrong.

    part           the same with this rank's part of them: what the model's own forward takes
    given          what ranks are to agree on
    targets        how many there are, an int64 scalar, if there are labels
    last_position  the largest of all: an int64 scalar
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
        self.size, self.seq_len = _shape(
            {name: x for name, x in self.arguments.items() if name in _OF_TOKENS}
        )
        self._check_shapes()
        padding, places = self.arguments.get("attention_mask"), self.arguments.get("position_ids")
        documents = None if places is None else _documents(places, padding)
        if documents is not None and config.model_type in _OF_ONE_DOCUMENT:
            raise ValueError(
                f"position_ids begin anew, but transformers does not tell documents of a {config.model_type} apart"
            )
        self._layouts = _layouts(sp, balanced, documents, self.seq_len)
        self._rank, labels = sp.rank, self._targets()
        if padding is not None:
            _check_padding(padding, labels)
        self.targets = None if labels is None else count_targets(labels)
        self.part = self._part(labels)
        self.last_position = torch.tensor(self.seq_len - 1) if places is None else places.amax()
        tensors = {name: self.part[name] for name in _OF_TOKENS if name in self.part}
        self.given = Given(
            tensors, mask=documents, layout=self._layouts, alike=self._alike(vocabulary)
        )

    def _check_shapes(self) -> None:
        whole = (self.size, self.seq_len)
        for name in ("labels", "shift_labels", "position_ids", "attention_mask"):
            x = self.arguments.get(name)
            if x is None:
                continue
            check_tensor(name, x)
            expected = (whole, (1, self.seq_len)) if name == "position_ids" else (whole,)
            if tuple(x.shape) not in expected:
                raise ValueError(
                    f"{name} must be of whole sequences, {' or '.join(map(str, expected))}, got shape {tuple(x.shape)}"
                )

    def _targets(self) -> Tensor | None:
        """(B, S), as transformers shifts labels: not across rows, but across documents."""
        labels = self.arguments.get("labels")
        if labels is None or "shift_labels" in self.arguments:
            return None if labels is None else self.arguments["shift_labels"]
        return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)

    def _part(self, targets: Tensor | None) -> dict[str, Any]:
        # what the model's own forward need not know
        own = ("attention_mask", "shift_labels", "logits_to_keep")
        part = {name: x for name, x in self.arguments.items() if name not in own} | {
            "use_cache": False
        }
        for name in _OF_TOKENS:
            if name in part:
                part[name] = self._shard_rows(part[name])
        tokens = next(part[name] for name in _OF_TOKENS if name in part)
        whole = part.get(
            "position_ids", torch.arange(self.seq_len, device=tokens.device).unsqueeze(0)
        )
        part["position_ids"] = self._shard_rows(whole)
        return part if targets is None else part | {"labels": self._shard_rows(targets)}

    def _shard_rows(self, x: Tensor) -> Tensor:
        """This rank's part of x (B, S, ...) or (1, S)."""
        if isinstance(self._layouts, Layout):
            return self._layouts.shard(x, self._rank, 1)
        rows = x.expand(self.size, *x.shape[1:])
        return torch.stack(
            [row.shard(y, self._rank, 0) for row, y in zip(self._layouts, rows, strict=True)]
        )

    def _alike(self, vocabulary: int | None) -> dict[str, Any]:
        """What ranks compare. Raises ValueError for tokens that are not in the vocabulary, on any
        rank's part.
        """
        alike: dict[str, Any] = {"arguments": sorted(self.arguments)}
        if "inputs_embeds" in self.arguments:
            x = self.arguments["inputs_embeds"]
            alike["inputs_embeds (whole, alike on every rank)"] = f"{tuple(x.shape)}, {x.dtype}"
        for name in (name for name in _COMPARED if name in self.arguments):
            x = self.arguments[name]
            alike[f"{name} (whole, the same on every rank)"] = (
                _number(name, x)
                if name == "num_items_in_batch"
                else _digest(x, vocabulary if name == "input_ids" else None)
            )
        return alike


def _check_arguments(arguments: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raises ValueError for what cannot be said of a part of a sequence."""
    if arguments.get("use_cache") or arguments.get("past_key_values") is not None:
        raise ValueError(
            "use_cache and past_key_values are of whole sequences, and these are cut over ranks"
        )
    if arguments.pop("output_attentions", None) or config.output_attentions:
        raise ValueError(
            "output_attentions: attention over ranks never has its probabilities as a whole"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(
            "is_causal is False in the configuration: attention to both sides is not enabled"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "use_bidirectional_attention in the configuration: attention to both sides is not enabled"
        )
    if arguments.pop("output_router_logits", None) or getattr(
        config, "output_router_logits", False
    ):
        raise ValueError(
            "output_router_logits: routers have a loss of whole sequences, and these are cut over ranks"
        )
    keep = arguments.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ValueError(
            f"logits_to_keep counts tokens of whole sequences, and these are cut over ranks: got {keep}"
        )
    if unknown := sorted(
        name for name, x in arguments.items() if x is not None and name not in _KNOWN
    ):
        raise ValueError(
            f"{' and '.join(unknown)}: it is not known how to cut this over ranks; documents are said by position_ids "
            "that begin anew"
        )


def _shape(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """B and S."""
    if len(tensors) != 1:
        raise ValueError(
            f"give either input_ids or inputs_embeds, got {' and '.join(tensors) or 'neither'}"
        )
    [(name, x)] = tensors.items()
    check_tensor(name, x)
    if x.dim() != (2 if name == "input_ids" else 3) or 0 in x.shape:
        raise ValueError(
            f"{name} must be (B, S{', E' * (name != 'input_ids')}), got shape {tuple(x.shape)}"
        )
    if name == "input_ids" and x.dtype not in (torch.int64, torch.int32):  # what embeddings look up
        raise TypeError(f"input_ids must be int64 or int32, got {x.dtype}")
    return x.shape[0], x.shape[1]


def _documents(places: Tensor, padding: Tensor | None) -> Mask | list[Mask] | None:
    """What tokens see that have these position_ids, if it is not all before them: of all rows, or
    of each.
    """
    begins = places.diff(dim=-1).ne(1)
    if padding is not None:
        if (begins & padding[:, 1:].ne(0)).any():
            raise ValueError(
                "position_ids begin anew where attention_mask has no padding: with an attention_mask transformers does "
                "not tell documents apart; leave it out"
            )
        return None
    starts: list[list[int]] = [[0] for _ in places]
    for row, place in begins.nonzero().tolist():
        starts[row].append(place + 1)
    if all(len(row) == 1 for row in starts):
        return None
    masks = [_of_documents((*row, places.shape[1])) for row in starts]
    return masks[0] if len(masks) == 1 else masks


def _layouts(
    sp: SequenceParallel, balanced: bool, documents: Mask | list[Mask] | None, seq_len: int
) -> Layout | list[Layout]:
    """Of all rows, or of each."""
    if not balanced:
        return sp.layout_of(seq_len)
    if isinstance(documents, list):
        return [balanced_layout(mask, sp.size) for mask in documents]
    return balanced_layout(documents or _causal(seq_len), sp.size)


def _check_padding(padding: Tensor, targets: Tensor | None) -> None:
    """Raises ValueError unless rows end with their padding, and padding has no targets."""
    valid = padding.ne(0)
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise ValueError(
            "attention_mask has padding before tokens that are none: rows must be padded on the right"
        )
    if targets is not None and (targets.to(valid.device).ne(IGNORE_INDEX) & ~valid).any():
        raise ValueError(f"labels of what attention_mask says is padding must be {IGNORE_INDEX}")


def _number(name: str, x: Any) -> str:
    """A number, or that of a tensor of one element, for which the host waits: 10, 10.0 and
    tensor(10) are the same.
    """
    if isinstance(x, Tensor):
        check_tensor(name, x)
        if x.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(x.shape)}")
        x = x.item()
    number = as_float(name, x)
    return str(int(number)) if number.is_integer() else repr(number)


def _digest(x: Tensor, vocabulary: int | None = None) -> str:
    """Shape and contents, for which the host waits once. Raises ValueError for a token beyond a
    vocabulary.
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


@functools.lru_cache(maxsize=_MOST_MASKS)
def _of_documents(cu_seqlens: tuple[int, ...]) -> Mask:
    return Mask.documents(cu_seqlens)
