"""The arguments of a forward: checks, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...base.arguments import as_bool, as_float, check_tensor
from ...loss import count_targets
from ...ranks.agreement import describe_term
from ...ranks.sequence_parallel import WholeSequence
from ...sequence.layout import IGNORE_INDEX, Balanced
from ...sequence.mask import Mask
from ...sparse import Choices
from .configs import find_window
from .documents import CU_SEQ_LENS, LONGEST, NAMING, check_targets, find_masks, sees_nothing
from .folded import FoldedRows
from .requests import ANY_WHOLE, WantedOutputs, find_asked, warn_once

_OF_TOKENS = ("input_ids", "inputs_embeds")
_WHOLE = ("labels", "shift_labels", "position_ids", "attention_mask", "seq_idx")
_OF_TRAINERS = "; in a trainer shard by trainer.accelerator.process_index, which counts groups"
_NUMBERS = ("num_items_in_batch", *LONGEST)
_OURS = ("whole_outputs", "loss_only", "fused_lm_head", "label_smoothing", "mask")
_COMPARED = ("input_ids", *_WHOLE, *CU_SEQ_LENS, *_NUMBERS)
_OTHERS = ("logits_to_keep", "use_cache", "output_hidden_states", "return_dict")
_KNOWN = {*_OF_TOKENS, *_COMPARED, *_OTHERS, *_OURS}
# arguments that say which tokens see each other, or what this forward returns
_NOT_FOR_THE_MODEL = {*CU_SEQ_LENS, *LONGEST, *_OURS}
_NOT_FOR_THE_MODEL |= {"attention_mask", "shift_labels", "logits_to_keep", "seq_idx"}
_WHOLE_OUTPUTS = {
    "output_attentions": "attention over ranks never has all its probabilities at once; leave it "
    "out, or set it to False in the configuration",
    "output_router_logits": "the loss of routers needs whole sequences, and these are cut over "
    "ranks; leave it out, or set it to False in the configuration. TRL's trainers ask for it "
    "unless router_aux_loss_coef=0, which SFTConfig and DPOConfig take",
}
_AXES = {  # hints about tensors of more than two axes
    "position_ids": ": positions of several axes, as of multimodal models, are not supported; pass "
    "one position a token",
    "attention_mask": ": a mask of S x S cannot be cut over ranks; name documents by numbers, and "
    "windows in the configuration",
}
_OF_HEADS = ("margin",)  # TRL's RewardTrainer passes whole batches, and its loss reads it
_CACHES = ("past_key_values", "cache")
_UNDEFINED = (
    "whole outputs were asked for, and some padding sees no token: padding on the left of a row, "
    "between documents, a window behind the last token, or anywhere in a model with a "
    "sparse_config. Its outputs have no defined value, since transformers' attentions differ "
    "there: leave them out of a loss. Other padding on the right has defined outputs"
)
_OF_ONE_DOCUMENT = ("gpt_oss",)  # models with masks that ignore documents


class ForwardInputs:
    """The arguments of a forward of an EnabledModel, of whole sequences. Layers get it instead of a
    mask. It is not a dataclass, since wrappers would rebuild it to move its tensors. Raises
    ValueError or TypeError if arguments are wrong.

    options        options of burst_attn_func
    choices        the blocks that sparse layers chose, for recomputations
    part           the arguments of the model's own forward: this rank's part of them
    whole          whether logits and hidden states are returned whole
    unasked        whether they are whole only because unknown code may read them
    loss_only      whether logits are left out
    fused          whether TRL's fused head computes log-probabilities instead of logits
    folded         the rows as one sequence, if the model folds and there is a fused head
    label_smoothing  the part of each target that is spread over the vocabulary
    targets        the token after each one, (B, S), if labels were given
    terms          what the ranks compare
    sequence       the batch as attention gets it
    num_targets    the number of targets, an int64 scalar; 0 without labels
    last_position  the largest position, an int64 scalar
    """

    def __init__(self, model: Any, arguments: dict[str, Any]):
        sp, config = model._sp, model.config
        if not model.has_head:
            arguments = {k: x for k, x in arguments.items() if k not in _OF_HEADS}
        _check_arguments(arguments, config)
        self.arguments = {name: x for name, x in arguments.items() if x is not None}
        size, seq_len = _check_tokens(
            {name: x for name, x in self.arguments.items() if name in _OF_TOKENS}
        )
        _check_shapes(self.arguments, size, seq_len)
        self.fused = as_bool("fused_lm_head", self.arguments.get("fused_lm_head", False))
        smoothing = as_float("label_smoothing", self.arguments.get("label_smoothing", 0.0))
        self.label_smoothing = 0.0 if self.fused else smoothing
        self.targets = self._find_targets()
        self.options, self.choices = model._options, Choices()
        self._choose_outputs(model)
        masks = self._find_masks(model, size, seq_len)
        names_documents = "mask" not in self.arguments and any(len(x.slices) > 1 for x in masks)
        if config.model_type in _OF_ONE_DOCUMENT and names_documents:
            raise ValueError(
                "documents are named, but transformers does not keep documents of a "
                f"{config.model_type} apart: pass one document a row"
            )
        padding = self.arguments.get("attention_mask")
        if padding is not None:
            labels = self.arguments.get("labels")
            check_targets(padding.ne(0), labels, self.arguments.get("shift_labels"))
        self.folded = self._fold(masks) if model._folds and self.fused else None
        if self.folded is not None:
            masks, seq_len = (self.folded.mask,), self.folded.mask.seq_len
        balanced = model._balanced or self.folded is not None
        layout = Balanced.name if balanced else sp.layout_of(seq_len)
        self.sequence = WholeSequence.local(masks, layout).resolve(sp)
        self.num_targets = 0 if self.targets is None else count_targets(self.targets)
        positions = self._find_positions(masks)
        self.last_position = positions.amax()
        self.part = self._shard_arguments(positions)
        embedding = model.get_input_embeddings()
        # None if torch's Embedding does not look tokens up
        vocabulary = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
        # balanced layouts follow from the documents
        self.terms = self._describe(vocabulary, describe_term(layout))
        self.arguments.pop("inputs_embeds", None)  # a backward keeps these inputs, but not this

    def _choose_outputs(self, model: Any) -> None:
        """Decide what is returned. A call's arguments come before requests and defaults."""
        asked = find_asked()
        if self.targets is not None:
            asked = asked or model._with_targets
        elif asked not in ANY_WHOLE:
            asked = model._without_targets
        if self.arguments.keys() & {"whole_outputs", "loss_only"}:
            asked = None
        whole = as_bool("whole_outputs", self.arguments.get("whole_outputs", asked in ANY_WHOLE))
        self.whole = whole or not model.has_head
        is_known = self.targets is None or self.fused  # outputs that every such call has
        self.unasked = asked is WantedOutputs.WHOLE_FOR_OTHERS and not is_known
        loss_only = self.arguments.get("loss_only", asked is WantedOutputs.LOSS_ONLY)
        self.loss_only = as_bool("loss_only", loss_only)

    def _find_masks(self, model: Any, size: int, seq_len: int) -> tuple[Mask, ...]:
        """Return the mask of all rows, or one for each. Padding sees tokens if its outputs are
        read, but not in sparse layers, which choose blocks of whole documents.
        """
        if (mask := self.arguments.get("mask")) is not None:
            return (_check_mask(mask, self.arguments, seq_len),)
        reads_outputs = self.whole or (self.targets is None and not self.loss_only)
        is_sparse = getattr(model.config, "sparse_config", None) is not None
        padding_sees = reads_outputs and not (self.fused or is_sparse)
        masks = find_masks(self.arguments, size, seq_len, padding_sees)
        window = find_window(model.config)
        is_asked = self.whole and not self.fused and model.has_head
        if is_asked and model._sp.rank == 0 and any(sees_nothing(x, window) for x in masks):
            warn_once("padding", _UNDEFINED)
        return masks

    def _find_targets(self) -> Tensor | None:
        """Return targets (B, S). Labels are shifted within rows, and across their documents."""
        labels, shifted = (self.arguments.get(name) for name in ("labels", "shift_labels"))
        asks = labels is not None or self.fused or self.label_smoothing
        # as in transformers, shift_labels alone ask for no loss, but a mask excludes labels
        if shifted is not None and (asks or "mask" in self.arguments):
            return shifted
        if not asks:
            return None
        if labels is None:
            name = "fused_lm_head" if self.fused else "label_smoothing"
            raise ValueError(f"{name} needs labels or shift_labels, got neither")
        return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)

    def _fold(self, masks: tuple[Mask, ...]) -> FoldedRows | None:
        """Return the rows as one sequence, unless the caller has folded them, or all is padding."""
        if "mask" in self.arguments or not any(mask.slices for mask in masks):
            return None
        if "input_ids" not in self.arguments:
            raise ValueError("fold compares the tokens of rows: expected input_ids, got none")
        assert self.targets is not None, "fused heads have them"
        given = self.arguments["input_ids"], self.targets, masks
        return FoldedRows(*given, self.arguments.get("position_ids"))

    def _find_positions(self, masks: tuple[Mask, ...]) -> Tensor:
        """Return positions (B, S) or (1, S)."""
        if "position_ids" in self.arguments and self.folded is None:
            return self.arguments["position_ids"]
        [tokens] = (self.arguments[name] for name in _OF_TOKENS if name in self.arguments)
        if "mask" in self.arguments or self.folded is not None:
            return masks[0].positions(tokens.device).unsqueeze(0)
        return torch.arange(masks[0].seq_len, device=tokens.device).unsqueeze(0)

    def _shard_arguments(self, positions: Tensor) -> dict[str, Any]:
        part = {name: x for name, x in self.arguments.items() if name not in _NOT_FOR_THE_MODEL}
        part["use_cache"] = False
        name = next(name for name in _OF_TOKENS if name in part)
        tokens, targets = part[name], self.targets
        if self.folded is not None:
            tokens, targets = self.folded.tokens, self.folded.targets
        part[name] = self.sequence.shard(tokens)
        part["position_ids"] = self.sequence.shard(positions)
        if targets is not None:
            targets = self.sequence.shard(targets)
            if self.fused:
                # The loss follows from the whole log_probs.
                part.pop("labels", None), part.pop("num_items_in_batch", None)
                part |= {"fused_lm_head": True, "shift_labels": targets}
            else:
                part["labels"] = targets
        return part

    def _describe(self, vocabulary: int | None, layout: str) -> dict[str, Any]:
        """Return the terms that ranks compare. Raises ValueError for unknown tokens of any rank."""
        terms: dict[str, Any] = {"arguments": sorted(self.arguments)}
        for name in ("inputs_embeds", *_COMPARED):
            if (x := self.arguments.get(name)) is None:
                continue
            if name == "inputs_embeds":
                described = f"{tuple(x.shape)}, {x.dtype}"
            elif name in _NUMBERS:
                described = _format_number(name, x)
            else:
                described = _digest(x, vocabulary if name == "input_ids" else None)
            hint = _OF_TRAINERS if name in _OF_TOKENS else ""
            terms[f"{name} (whole, identical on every rank{hint})"] = described
        outputs = {name: self.arguments[name] for name in _OURS if name in self.arguments}
        outputs |= {"whole_outputs": self.whole, "loss_only": self.loss_only}
        terms |= outputs | {"fold": self.folded is not None, "layout": layout}
        return terms | {"tokens": self.part["position_ids"].shape[1]}


def _check_mask(mask: Any, arguments: Mapping[str, Any], seq_len: int) -> Mask:
    """Return the mask of a call. Raises TypeError or ValueError unless it fits the arguments."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask of bmt_burst or None, got {type(mask).__name__}")
    if (mask.seq_len, mask.kv_len) != (seq_len, seq_len):
        raise ValueError(
            f"mask must be of {seq_len} tokens as the rows, got {mask.seq_len} queries and "
            f"{mask.kv_len} keys"
        )
    others = [name for name in (*NAMING, *LONGEST) if name in arguments and name != "position_ids"]
    if others:
        raise ValueError(f"expected mask or {' and '.join(others)}, got both: a mask says it all")
    if "labels" in arguments:
        raise ValueError(
            "mask: the next token of a tree is not the next one in its row: expected shift_labels, "
            "such as the targets of fold_prefixes, got labels"
        )
    return mask


def _check_shapes(arguments: Mapping[str, Any], size: int, seq_len: int) -> None:
    for name in _WHOLE:
        if (x := arguments.get(name)) is None:
            continue
        check_tensor(name, x)
        expected = [(size, seq_len), *[(1, seq_len)] * (name == "position_ids")]
        if tuple(x.shape) not in expected:
            texts = " or ".join(map(str, dict.fromkeys(expected)))
            hint = _AXES.get(name, "") if x.dim() > 2 else ""
            raise ValueError(
                f"{name} must be of whole sequences, {texts}, got shape {tuple(x.shape)}{hint}"
            )


def _check_arguments(arguments: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise ValueError for arguments that are not supported for a part of a sequence."""
    if arguments.get("use_cache") or any(arguments.get(name) is not None for name in _CACHES):
        raise ValueError(
            "use_cache and past_key_values need whole sequences, and these are cut over ranks: "
            "leave them out, or generate with a model that is not enabled"
        )
    for name, reason in _WHOLE_OUTPUTS.items():
        if arguments.pop(name, None) or getattr(config, name, False):
            raise ValueError(f"{name}: {reason}")
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
            f"{' and '.join(unknown)}: cannot cut an unknown argument over ranks; leave it out"
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


def _format_number(name: str, x: Any) -> str:
    """Format a number or a tensor of one element: 10, 10.0 and tensor(10) give the same text."""
    if isinstance(x, Tensor):
        check_tensor(name, x)
        if x.numel() != 1:
            raise ValueError(f"{name} must be one number, got shape {tuple(x.shape)}")
        x = x.item()
    number = as_float(name, x)
    return str(int(number)) if number.is_integer() else repr(number)


def _digest(x: Tensor, vocabulary: int | None = None) -> str:
    """Describe shape and contents. Raises ValueError for a token outside a vocabulary."""
    numbers = x.flatten()
    bits = numbers.double().view(torch.int64) if x.is_floating_point() else numbers.long()
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 0x2545F4914F6CDD1D  # wraps around
    mixed = (bits + 1) * (weights ^ (weights >> 29))
    digest, least, largest = torch.stack([(mixed ^ (mixed >> 32)).sum(), *bits.aminmax()]).tolist()
    if vocabulary is not None and not 0 <= least <= largest < vocabulary:
        token = least if least < 0 else largest
        raise ValueError(f"token {token} of input_ids is not in a vocabulary of {vocabulary}")
    return f"{tuple(x.shape)}, digest {digest % (1 << 64):016x}"
