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

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from ..attention import burst_attn_func
from ..base.arguments import as_bool, as_float, check_tensor
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..calls.masking import balanced_layout
from ..calls.refusal import refuse_call
from ..loss import count_targets, cross_entropy_sum
from ..ranks.agreement import run_together
from ..ranks.groups import SequenceParallel
from ..ranks.rings import make_rings
from ..sequence.layout import IGNORE_INDEX, Layout
from ..sequence.mask import Mask
from .batch import Given, agree

ATTENTION = "bmt_burst"  # the name under which transformers knows this attention

_NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "MiniCPM3", "Gemma2", "GptOss")
_MOST_MASKS = 256  # that are kept with a window
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


class Sight:
    """What layers are given in place of a mask. Not a dataclass: wrappers would rebuild it to move
    its tensors.

    options  of burst_attn_func, with a mask or causal=True
    seq_len  S
    targets  of the whole batch, if there are labels: an int64 scalar
    """

    def __init__(self, options: dict[str, Any], seq_len: int, targets: Tensor | None):
        self.options, self.seq_len, self.targets = options, seq_len, targets

    def within(self, window: int | None) -> dict[str, Any]:
        """The options for a layer where a token sees itself and the window - 1 before it."""
        if window is None or window >= self.seq_len:
            return self.options
        rest = {name: option for name, option in self.options.items() if name != "causal"}
        seen = self.options.get("mask", _causal(self.seq_len))
        return rest | {
            "mask": _windowed(seen, window)
            if isinstance(seen, Mask)
            else [_windowed(x, window) for x in seen]
        }


@not_compiled
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    bmt_burst: Sight | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """What layers call: query (B, H, S_local, D), key and value (B, G, S_local, D) to (B, S_local,
    H, D).

    Values may have smaller heads than keys, as in MiniCPM3. `s_aux` (H,) are sinks, as in GptOss.
    `attention_mask` is what `_window_of_masks` returns.
    """
    if bmt_burst is None:
        raise TypeError(
            f"a {type(module).__name__} was called without what its tokens see: call the model that was enabled"
        )
    try:
        _check_layer(module, dropout, sliding_window, attention_mask)
    except ValueError as error:
        refuse_call(error, bmt_burst.options["process_group"], bmt_burst.options["double_group"])
    narrower = key.shape[-1] - value.shape[-1]
    padded = F.pad(value, (0, narrower)) if narrower else value
    q, k, v = (x.transpose(1, 2) for x in (query, key, padded))
    sinks = None if s_aux is None else s_aux.to(accumulator_dtype(q.dtype))
    options = {**bmt_burst.within(sliding_window), "softcap": softcap, "sinks": sinks}
    return burst_attn_func(q, k, v, scaling, **options)[..., : value.shape[-1]], None


def _window_of_masks(*_args: Any, local_size: int | None = None, **_named: Any) -> int | None:
    """What models make in place of a mask: the window that it would have."""
    return local_size


def _check_layer(
    module: nn.Module, dropout: float, window: int | None, window_of_model: int | None
) -> None:
    """Raises ValueError for what a layer or its configuration asks for that is not computed."""
    if dropout:
        raise ValueError(
            f"attention over ranks cannot drop probabilities, and attention_dropout is {dropout}: set it to 0 in the "
            "configuration, or call the model's eval()"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window, of the configuration, must be at least 1 or None, got {window}"
        )
    if window != window_of_model:
        raise ValueError(
            f"a {type(module).__name__} has a window of {window}, and its model makes masks with one of "
            f"{window_of_model}: some of transformers' attentions follow the layer and some the mask; make them equal"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"is_causal is False in a {type(module).__name__}: attention to both sides is not enabled"
        )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _window_of_masks)


class _InPlace:
    """Comes before the class of an object that is enabled. Copies, and what is read from pickles,
    are enabled too.
    """

    def __reduce_ex__(self, _protocol: int) -> tuple:
        return _new, type(self).__bases__, self.__getstate__()


class _Model(_InPlace):
    """A causal language model over the ranks of `_sp`."""

    def __init__(self, *_args: Any, **_named: Any):
        raise TypeError(
            f"another {type(self).__name__} cannot be made by the class of an enabled one: take transformers' own, and "
            "enable what it makes"
        )

    def _over_ranks(self, own: Callable, args: tuple, named: dict[str, Any]) -> Any:
        """The model's own forward, of this rank's tokens; see the module."""
        return own(**self._part(own, args, named))

    @not_compiled
    def _part(self, own: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
        """What the model's own forward takes, once all ranks agree."""
        call: _Call | None = None

        def part() -> Given:
            nonlocal call
            _check_configs(self)
            call = _Call(
                self._sp, self._balanced, self.config, self._vocabulary(), _bound(own, args, named)
            )
            return call.given

        batch = agree(self._sp, f"the forward of a {type(self).__name__}", part)
        options = self._options | self._sp.groups | batch.masking(causal=True, padding_sees=False)
        for module in self.modules():
            if isinstance(module, _Rotary):
                module._last = call.last_position
        return call.part | {"bmt_burst": Sight(options, call.seq_len, call.targets)}

    def _vocabulary(self) -> int | None:
        """How many tokens there are embeddings of; None if it is not torch's Embedding that looks
        them up.
        """
        embedding = self.get_input_embeddings()
        return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None

    @property
    def loss_function(self) -> Callable:
        """What the model's forward calls with this rank's part."""
        return self._loss

    @not_compiled
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        bmt_burst: Sight,
        num_items_in_batch: Tensor | int | None = None,
        **_others: Any,
    ) -> Tensor:
        """logits (B, S_local, V) and their targets (B, S_local), shifted, to the mean over the
        targets of all ranks.
        """
        rings = make_rings(self._sp.process_group, self._sp.double_group)
        doing = f"the loss of a {type(self).__name__}"
        total, _ = run_together(
            rings, doing, lambda: cross_entropy_sum(logits, labels.to(logits.device))
        )
        count = bmt_burst.targets if num_items_in_batch is None else num_items_in_batch
        count = count.to(total.device).reshape(()) if isinstance(count, Tensor) else count
        return _Joined.apply(total / count, self._sp)

    def generate(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} does not generate, since caches are of whole sequences: load what "
            "save_pretrained writes into a model that is not enabled"
        )

    def set_attn_implementation(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} keeps its attention, since others see this rank's tokens alone: choose "
            "kernels by the flash of enable, or load what save_pretrained writes into a model that is not enabled"
        )


class _Rotary(_InPlace):
    """One whose angles depend on how long the longest sequence is, of which this rank has a part.

    `_last` is the last position of all.
    """

    _last: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        if self._last is None:
            raise TypeError(
                f"a {type(self).__name__} was called by itself: call the model that was enabled"
            )
        last = self._last.to(position_ids).expand(len(position_ids), 1)
        cos, sin = super().forward(x, position_ids=torch.cat((position_ids, last), 1), **named)
        return cos[:, :-1], sin[:, :-1]


class _Joined(torch.autograd.Function):
    """The sum of what the ranks of sp have, on each of them. Gradients are the ranks' own, times
    their number.
    """

    @staticmethod
    def forward(ctx, share: Tensor, sp: SequenceParallel) -> Tensor:
        ctx.size = sp.size
        return sp.with_layout("contiguous").unshard(share.reshape(1), sp.size, 0).sum()

    @staticmethod
    def backward(ctx, dsum: Tensor) -> tuple[Tensor, None]:
        return dsum * ctx.size, None


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
def _causal(seq_len: int) -> Mask:
    return Mask.causal(seq_len)


@functools.lru_cache(maxsize=_MOST_MASKS)
def _of_documents(cu_seqlens: tuple[int, ...]) -> Mask:
    return Mask.documents(cu_seqlens)


@functools.lru_cache(maxsize=_MOST_MASKS)
def _windowed(mask: Mask, window: int) -> Mask:
    """Made once for all layers and calls, and all that comes of a mask with it."""
    return mask.windowed(window)


def _families() -> dict[type[PreTrainedModel], type[nn.Module]]:
    """The models that are known, those of them that this transformers has, and their attention."""
    models = [
        getattr(transformers, f"{name}ForCausalLM")
        for name in _NAMES
        if hasattr(transformers, f"{name}ForCausalLM")
    ]
    return {
        x: getattr(sys.modules[x.__module__], x.__name__.replace("ForCausalLM", "Attention"))
        for x in models
    }


_FAMILIES = _families()

_REFUSED = {
    "MiniCPMForCausalLM": "the code that comes with its weights does not ask transformers for its attention; "
    "train/export.py without --keep-scalings makes a Llama of a MiniCPM",
}


def _check_model(model: Any) -> None:
    """Raises TypeError or ValueError for what cannot be enabled."""
    name = type(model).__name__
    if isinstance(model, _Model):
        raise ValueError(f"this {name} is enabled already, for {model._sp.size} ranks")
    base = next((base for base in _FAMILIES if isinstance(model, base)), None)
    if base is None:
        if name in _REFUSED:
            raise TypeError(f"{name} cannot be sequence parallel: {_REFUSED[name]}")
        known = ", ".join(base.__name__ for base in _FAMILIES)
        raise TypeError(f"expected one of transformers' {known}, got a {name}{_hint(model)}")
    if not _has_forward_of(base, model):
        raise TypeError(
            f"this {name} has another forward than transformers' {base.__name__}, which would be lost"
        )
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        if not _has_forward_of(_FAMILIES[base], attention):
            raise TypeError(
                f"a layer's attention, a {type(attention).__name__}, has another forward than transformers' "
                f"{_FAMILIES[base].__name__}, which is known to ask for its attention by name"
            )
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"this {name} has another loss than transformers' ForCausalLMLoss, which would be lost"
        )


def _has_forward_of(base: type[nn.Module], module: Any) -> bool:
    """Whether it is a `base` with the forward that transformers gives it, which some packages
    replace in the class.
    """
    own = (
        isinstance(module, base)
        and type(module).forward is base.forward
        and "forward" not in vars(module)
    )
    return own and base.forward.__module__ == base.__module__


def _hint(model: Any) -> str:
    """Which of its modules could be enabled."""
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, tuple(_FAMILIES)):
            return f": give its {path}, a {type(part).__name__}"
    return ""


class _LayerConfig:
    """The configuration of a module inside an enabled model, which names ATTENTION.

    All else is read from `config`, and written to it. That one may be the model's own, and other
    models can be made of it, since it names an attention of transformers.
    """

    _attn_implementation = ATTENTION

    def __init__(self, config: PreTrainedConfig):
        object.__setattr__(self, "config", config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)

    def __reduce__(self) -> tuple:
        return _LayerConfig, (self.config,)


def _give_own_configs(model: PreTrainedModel) -> None:
    """Let the modules inside `model` name their attention, without other models that have the same
    configurations.

    Modules that share a configuration still do. A model need not have that of its layers, which may
    come from elsewhere.
    """
    known: dict[int, Any] = {}
    for module, config in _configs(model):
        own = copy.deepcopy(config, known)
        module.config = own if module is model else _LayerConfig(own)
    model._attention = model.config._attn_implementation


def _check_configs(model: PreTrainedModel) -> None:
    """Raise ValueError if a module would ask for another attention, which sees this rank's tokens
    alone.
    """
    for module, config in _configs(model):
        if config._attn_implementation != (model._attention if module is model else ATTENTION):
            raise ValueError(
                f"the configuration of a {type(module).__name__} asks for {config._attn_implementation!r} attention, "
                "which would see this rank's tokens alone: neither replace modules and configurations of an enabled "
                "model nor set their _attn_implementation"
            )


def _configs(model: PreTrainedModel) -> list[tuple[nn.Module, Any]]:
    """The modules that have a configuration, each with its own."""
    found = ((module, vars(module).get("config")) for module in model.modules())
    return [
        (module, config)
        for module, config in found
        if isinstance(config, PreTrainedConfig | _LayerConfig)
    ]


@functools.cache
def _enabled(own: type[_InPlace], base: type[nn.Module]) -> type[nn.Module]:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    if own is _Model:

        @functools.wraps(base.forward)  # Trainers read its signature
        def forward(self, *args: Any, **named: Any) -> Any:
            return self._over_ranks(functools.partial(base.forward, self), args, named)

        names["forward"] = forward
    return type(base.__name__, (own, base), names)


def _new(own: type[_InPlace], base: type[nn.Module]) -> nn.Module:
    enabled = _enabled(own, base)
    return enabled.__new__(enabled)


def _bound(function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    signature = inspect.signature(function)
    arguments = signature.bind(*args, **named).arguments
    rest = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), None)
    return {**{name: x for name, x in arguments.items() if name != rest}, **arguments.get(rest, {})}
