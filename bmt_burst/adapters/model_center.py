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

import bisect
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import model_center.model as zoo
import torch
from model_center.layer import Attention, SegmentPositionEmbedding
from torch import Tensor, nn

from ..attention import burst_attn_func
from ..calls.refusal import refuse_call
from ..nn import Layouts, Masks, apply_rope, rope_tables
from ..ranks.groups import SequenceParallel
from ..scores import BY_DISTANCE, Scores
from ..sequence.mask import Mask
from .batch import Batch, Given, Row, Runs, agree

_MASKED = -1e4  # a score that softmax makes 0 of
_MOST_SCORES = 16  # of rows and of what is seen of them that are kept


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


@dataclass(frozen=True)
class _Sight:
    """What layers are given in place of a mask.

    options  of burst_attn_func
    rotate   turns q or k (B, S_local, H, D) by the positions of their tokens, in models that do
    """

    options: dict[str, Any]
    rotate: Callable[[Tensor], Tensor] | None


class _Attention(Attention):
    """ModelCenter's attention, with its parameters, over the ranks of `_sp`."""

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        attention_mask: _Sight | Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Any = None,
    ) -> Any:
        """query and key_value (B, S_local, E) to (B, S_local, E). Without a _Sight as before, for
        one rank.

        position_bias  the table (R, H) of what the _Sight's scores add, if there is one
        """
        if not isinstance(attention_mask, _Sight):
            if self._sp.size > 1:
                raise TypeError(
                    f"attention over {self._sp.size} ranks got a {type(attention_mask).__name__} as its mask: call the "
                    "model, which knows what its layers see, not its layers"
                )
            return super().forward(
                query, key_value, attention_mask, position_bias, use_cache, past_key_value
            )
        if self.training and self.attention_dropout is not None and self.attention_dropout.p:
            error = ValueError(
                f"attention over ranks cannot drop probabilities, and dropout_p is {self.attention_dropout.p}: build "
                "the model with dropout_p=0, or call its eval()"
            )
            refuse_call(error, self._sp.process_group, self._sp.double_group)
        projected = self.project_q(query), self.project_k(key_value), self.project_v(key_value)
        q, k, v = (x.unflatten(-1, (-1, self.dim_head)) for x in projected)
        if self.pos_bias_type == "rotary":
            q, k = attention_mask.rotate(q), attention_mask.rotate(k)
        scale = None if self.attn_scale else 1.0
        out = burst_attn_func(q, k, v, scale, **attention_mask.options, bias=position_bias)
        return self.attention_out(out.flatten(2))


class _Model:
    """What comes before a model's own class once it is enabled; a subclass for each family.

    layers          the name of its Encoder
    of_tokens       arguments of its forward, each of a rank's tokens by themselves
    causal          tokens see those before them, or all
    padding_sees    tokens that are padding see those that are not
    pos_bias_types  of its attention layers
    """

    layers = "encoder"
    of_tokens: tuple[str, ...] = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
    causal = True
    padding_sees = True
    pos_bias_types: tuple[str, ...] = ("none",)

    @staticmethod
    def check(model: nn.Module) -> None:
        """Raises ValueError for a model whose options cannot be enabled."""

    def forward(
        self, *args: Any, mask: Masks | None = None, layout: Layouts | None = None, **named: Any
    ) -> Any:
        """The model's own forward, of this rank's tokens; see the module."""
        own, given = super().forward, {}
        if self._sp.size == 1 and _generates(_bound(own, args, named)):
            if mask is not None or layout is not None:
                raise ValueError("mask and layout do not go with use_cache and past_key_values")
            return own(*args, **named)

        def part() -> Given:
            given.update(_bound(own, args, named))
            self._check(given)
            tensors = {name: given[name] for name in self.of_tokens if name in given}
            padding = {name: given[name] for name in ("length", "attention_mask")}
            return Given(tensors, **padding, mask=mask, layout=layout, **self._marks(given))

        batch = agree(self._sp, f"the forward of a {type(self).__name__}", part)
        hidden = self._embed(given, batch)
        options = self._options | self._sp.groups | self._masking(batch, hidden.device)
        sight = _Sight(options, self._rotation(batch, hidden))
        return self._output(
            given, getattr(self, self.layers)(hidden, sight, self._table(hidden.device))
        )

    def __reduce_ex__(self, _protocol: int) -> NoReturn:
        raise TypeError(
            f"an enabled {type(self).__name__} is neither copied nor pickled, as torch.save would: save its weights, "
            "with bmtrain.save, and load them into a model that is enabled then"
        )

    def _check(self, given: dict[str, Any]) -> None:
        """Raises ValueError for what only a whole sequence has."""
        if _generates(given):
            raise ValueError(
                f"use_cache and past_key_values are of whole sequences, and these are cut over {self._sp.size} ranks: "
                "generate with a model that is not enabled, or is for one rank"
            )

    def _marks(self, _given: dict[str, Any]) -> dict[str, Tensor | None]:
        """What all ranks are to know of all tokens, as Given has it."""
        return {}

    def _masking(self, batch: Batch, _device: torch.device) -> dict[str, Any]:
        """What burst_attn_func is told of what tokens see."""
        return batch.masking(self.causal, self.padding_sees)

    def _table(self, _device: torch.device) -> Tensor | None:
        """The bias of the scores that _masking has: (R, H), or None."""
        return None

    def _embed(self, given: dict[str, Any], _batch: Batch) -> Tensor:
        """What goes into the layers: (B, S_local, E)."""
        return self._embed_tokens(given)

    def _embed_tokens(self, given: dict[str, Any]) -> Tensor:
        embeds = given["inputs_embeds"]
        return self.input_embedding(given["input_ids"]) if embeds is None else embeds

    def _rotation(self, _batch: Batch, _hidden: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Of q and k, for hidden states on their device and in their dtype."""
        return None

    def _output(self, given: dict[str, Any], hidden: Tensor) -> Any:
        logits = self._logits(hidden) if given["output_logits"] else None
        if not given["return_dict"]:
            return hidden, None, logits, None, None
        return zoo.BaseModelOutput(last_hidden_state=hidden, logits=logits)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.config.cls_head:
            return self.cls_projection(hidden)
        if hasattr(self, "output_projection"):
            return self.output_projection(hidden)
        return self.input_embedding.projection(hidden)


class _Rotary(_Model):
    """One that turns queries and keys by their positions."""

    pos_bias_types = ("rotary", "none")

    def _rotation(self, batch: Batch, hidden: Tensor) -> Callable[[Tensor], Tensor]:
        whole = [row.positions() for row in batch.rows]
        last, dtype = max(int(x.max()) for x in whole), self._angle_dtype(hidden)
        if last > torch.finfo(dtype).max and not self._exact_rotary:
            raise ValueError(
                f"position {last} is infinite in {dtype}, in which ModelCenter forms the angles of rotary embeddings: "
                "enable the model with exact_rotary=True"
            )
        tables = self._exact_tables if self._exact_rotary else self._tables
        cos, sin = tables(batch.cut(whole).to(hidden.device), dtype)
        return lambda x: self._rotate(x, cos, sin)

    def _angle_dtype(self, hidden: Tensor) -> torch.dtype:
        """In which ModelCenter forms angles."""
        return hidden.dtype


class _Llama(_Rotary):
    """Angles are rounded to the dtype of its frequencies, and so are positions."""

    padding_sees = False
    _rotate = staticmethod(apply_rope)

    def _angle_dtype(self, _hidden: Tensor) -> torch.dtype:
        return self.position_bias.inv_freq.dtype

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scaled = positions.to(dtype) * self.position_bias.distance_scale
        angles = scaled.unsqueeze(-1) * self.position_bias.inv_freq.to(positions.device)
        return angles.cos().float(), angles.sin().float()

    def _exact_tables(self, positions: Tensor, _dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rotary = self.position_bias
        return rope_tables(positions * rotary.distance_scale, 2 * len(rotary.inv_freq), rotary.base)


class _GPTj(_Rotary):
    """Angles are rounded to the dtype of what is turned: the first entries of a head, in pairs of
    neighbours.
    """

    @property
    def _turned(self) -> int:
        return min(self.position_bias.rotary_dim, self.config.dim_head)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = 1.0 / 10000 ** (
            torch.arange(0, self._turned, 2) / self._turned
        )  # on the CPU: GPUs round otherwise
        angles = (positions.float().unsqueeze(-1) * frequencies.to(positions.device)).to(dtype)
        return angles.cos().float(), angles.sin().float()

    def _exact_tables(self, positions: Tensor, _dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self._turned)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        # The entries of q and k change places alike, so their products stay.
        return torch.cat(
            (apply_rope(torch.cat((turned[..., ::2], turned[..., 1::2]), -1), cos, sin), rest), -1
        )


class _Learned(_Model):
    """One that adds learned embeddings of positions to those of tokens."""

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        hidden = self._embed_tokens(given)
        ids = given["position_ids"]
        if ids is None:
            ids = self._position_ids(batch).to(hidden.device)
        return self.embed_dropout(hidden + self.position_embedding(ids))

    def _position_ids(self, batch: Batch) -> Tensor:
        """(S_local,), or (B, S_local) if rows differ; on the CPU."""
        whole = list(self._whole_position_ids(batch))
        last, count = (
            max(int(x.max()) for x in whole),
            self.position_embedding._parameters["weight"]._original_shape[0],
        )
        if last >= count:
            raise ValueError(
                f"position {last} is none of the {count} that {type(self).__name__} has embeddings for"
            )
        return batch.cut(whole)

    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        """(S,) for each row."""
        return (row.positions() for row in batch.rows)


class _GPT2(_Learned):
    pass


class _OPT(_Learned):
    """Counts only tokens that are no padding, from 2 on; padding has 1."""

    layers = "decoder"

    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        for row in batch.rows:
            padding = torch.ones(row.layout.seq_len, dtype=torch.bool)
            for start, stop in row.valid:
                padding[start:stop] = False
            positions = padding.logical_not().cumsum(0) - 1 if row.mask is None else row.positions()
            yield (positions + 2).masked_fill(padding, 1)


class _Bert(_Learned):
    causal = False
    padding_sees = False

    def _embed_tokens(self, given: dict[str, Any]) -> Tensor:
        hidden, types = super()._embed_tokens(given), given["token_type_ids"]
        if types is None:
            types = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return hidden + self.token_type_embedding(types)

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        if given["output_pooler_output"] and self._sp.size > 1:
            raise ValueError(
                f"output_pooler_output is made of the first token, which one of {self._sp.size} ranks has"
            )

    def _output(self, given: dict[str, Any], hidden: Tensor) -> Any:
        pooled = self.pooler(hidden) if given["output_pooler_output"] else None
        logits = self._logits(hidden) if given["output_logits"] else None
        if not given["return_dict"]:
            return hidden, pooled, None, logits, None, None
        return zoo.BaseModelOutputWithPooling(
            last_hidden_state=hidden, pooler_output=pooled, logits=logits
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.config.cls_head:
            return self.cls_projection(hidden)
        return (
            self.lm_head(hidden, self.input_embedding) if self.config.tied else self.lm_head(hidden)
        )


class _Roberta(_Bert):
    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        return (row.positions() + self.padding_idx + 1 for row in batch.rows)


class _Biased(_Model):
    """One that adds a learned bias of relative positions to its scores, and sees a context as a
    whole.

    Subclasses have _rows, the table in the model's dtype, and _scores, which of its rows a
    sequence's pairs have.
    """

    of_tokens = ("input_ids", "inputs_embeds")
    pos_bias_types = ("relative",)

    def _marks(self, given: dict[str, Any]) -> dict[str, Tensor | None]:
        return {name: given[name] for name in ("context", "span", "position_ids")}

    def _masking(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        def scores(row: Row, mask: Mask) -> Scores:
            _check_distances(row, mask)
            return self._scores(row, mask, device)

        return batch.scoring(self.causal, self.padding_sees, scores)

    def _table(self, device: torch.device) -> Tensor:
        """In fp32, so that its gradient is not rounded to 16 bits in each layer."""
        table = self._rows(device)
        return table.to(torch.promote_types(table.dtype, torch.float32))


class _CPM1(_Biased):
    """The table has a row for each distance, up to where all are alike: what the model itself looks
    up for it.
    """

    @property
    def _reach(self) -> int:
        return max(self.position_bias.max_distance, self.position_bias.num_buckets)

    def _scores(self, _row: Row, mask: Mask, _device: torch.device) -> Scores:
        return _by_distance(mask, self._reach)

    def _rows(self, device: torch.device) -> Tensor:
        queries = torch.arange(self._reach, -self._reach - 1, -1, device=device)
        return (
            self.position_bias(queries, torch.zeros(1, dtype=torch.int64, device=device))
            .squeeze(2)
            .T
        )


class _CPM3(_Biased):
    """The table is the model's: rows of distances within a segment, then one for each pair of
    segments.
    """

    @staticmethod
    def check(model: nn.Module) -> None:
        exact = model.position_bias.num_buckets // 4
        if model.position_bias.max_distance <= exact:
            raise ValueError(
                f"position_bias_max_distance must be beyond the {exact} distances that have buckets of their own, got "
                f"{model.position_bias.max_distance}"
            )

    def _marks(self, given: dict[str, Any]) -> dict[str, Tensor | None]:
        return super()._marks(given) | {"token_type_ids": given["token_type_ids"]}

    def _scores(self, row: Row, mask: Mask, device: torch.device) -> Scores:
        bias = self.position_bias
        segments = (((0, mask.seq_len), 0),) if row.segments is None else row.segments
        for (start, _), number in segments:
            if not 0 <= number < bias.num_segments:
                raise ValueError(
                    f"token_type_ids are segments below {bias.num_segments}, token {start} of a row has {number}"
                )
        distances = bias.num_buckets, bias.max_distance, bias.bidirectional, device
        return _by_segment(
            mask, segments, bias.num_segments, bias.absolute_inner_segment, distances
        )

    def _rows(self, _device: torch.device) -> Tensor:
        return self.position_bias.relative_attention_bias

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        """The first tokens of a sequence are prompts, which have embeddings of their own."""
        ids = given["input_ids"]
        if given["inputs_embeds"] is not None:
            return given["inputs_embeds"]
        places = batch.cut(torch.arange(row.layout.seq_len) for row in batch.rows).to(ids.device)
        is_prompt = (places < self.config.prompt_length).expand(ids.shape)
        prompts, others = (
            embedding(ids.where(chosen, 0))
            for embedding, chosen in (
                (self.prompt_embedding, is_prompt),
                (self.input_embedding, ~is_prompt),
            )
        )
        return prompts.where(is_prompt.unsqueeze(-1), others)


def _check_distances(row: Row, mask: Mask) -> None:
    """Raises ValueError if tokens that see each other are not as far apart by position_ids as they
    are.
    """
    jumps = [start for (start, _), _ in row.shifts[1:]] if row.shifts else []
    # where parts begin that are more than padding
    seeing = {min(s.q[0], s.kv[0]) for s in mask.slices}
    for start, stop in mask.parts if jumps else ():
        first = bisect.bisect_right(jumps, start)
        if start in seeing and first < len(jumps) and jumps[first] < stop:
            raise ValueError(
                f"position_ids do not go on by one at token {jumps[first]} of a row, which tokens before it see or "
                "are seen by: leave them out, or give span or mask if sequences are packed"
            )


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_distance(mask: Mask, reach: int) -> Scores:
    return Scores.by_distance(mask, torch.arange(2 * reach + 1, dtype=torch.int32))


@functools.lru_cache(maxsize=_MOST_SCORES)
def _by_segment(
    mask: Mask,
    segments: Runs,
    count: int,
    by_distance: bool,
    distances: tuple[int, int, bool, torch.device],
) -> Scores:
    """Of `count` segments; pairs of one segment have rows by their distance, or one for each
    segment.
    """
    segment = torch.cat(
        [torch.full((stop - start,), number) for (start, stop), number in segments]
    ).int()
    pairs = distances[0] + torch.arange(count**2, dtype=torch.int32)
    if by_distance:
        pairs[:: count + 1] = BY_DISTANCE
    return Scores(
        mask,
        torch.zeros_like(segment),
        segment * count,
        segment,
        pairs,
        _distance_rows(*distances),
        0,
    )


@functools.cache
def _distance_rows(
    num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Of the distances from -max_distance on: (2 max_distance + 1,) int32 on the CPU, as models
    round on `device`.
    """
    ahead = torch.arange(-max_distance, max_distance + 1, device=device)
    bucket_of = SegmentPositionEmbedding._absolute_position_bucket
    return bucket_of(None, ahead, bidirectional, num_buckets, max_distance).int().cpu()


_FAMILIES: dict[type[nn.Module], type[_Model]] = {
    zoo.Llama: _Llama,
    zoo.GPTj: _GPTj,
    zoo.GPT2: _GPT2,
    zoo.OPT: _OPT,
    zoo.Bert: _Bert,
    zoo.Roberta: _Roberta,
    zoo.CPM1: _CPM1,
    zoo.CPM3: _CPM3,
}

_REFUSED: dict[type[nn.Module], str] = {
    zoo.CPM2: "its decoder attends to another sequence",
    zoo.T5: "its decoder attends to another sequence",
    zoo.GLM: "its prefix and its positions are read off the whole input",
    zoo.Longformer: "its attention is sparse, over chunks of a sequence that it pads",
    zoo.ViT: "its sequence is made inside of it, of an image",
}


def _family(model: nn.Module) -> type[_Model]:
    """What the model becomes. Raises ValueError if it is that already, TypeError if it can be
    nothing.
    """
    name = type(model).__name__
    if isinstance(model, _Model):
        raise ValueError(f"this {name} is enabled already, for {model._sp.size} ranks")
    for base, reason in _REFUSED.items():
        if isinstance(model, base):
            raise TypeError(f"{name} cannot be sequence parallel: {reason}")
    for base, family in _FAMILIES.items():
        if isinstance(model, base):
            if type(model).forward is not base.forward or "forward" in vars(model):
                raise TypeError(
                    f"this {name} has another forward than {base.__name__}, which would be lost"
                )
            return family
    known = ", ".join(base.__name__ for base in _FAMILIES)
    raise TypeError(f"expected one of ModelCenter's {known}, got a {name}{_hint(model)}")


def _hint(model: Any) -> str:
    """Which of its modules could be enabled."""
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, tuple(_FAMILIES)):
            return f": give its {path}, a {type(part).__name__}"
    return ""


def _check_layer(layer: Attention, family: type[_Model]) -> None:
    if type(layer) is not Attention or "forward" in vars(layer):
        raise TypeError(
            f"a layer has another forward than Attention, which would be lost: {type(layer).__name__}"
        )
    if layer.pos_bias_type not in family.pos_bias_types:
        expected = " or ".join(map(repr, family.pos_bias_types))
        raise ValueError(
            f"pos_bias_type must be {expected} in this model, got {layer.pos_bias_type!r}"
        )
    if layer.mask_value > _MASKED:
        raise ValueError(
            f"att_mask_value={layer.mask_value} would let tokens see what is masked: {_MASKED} or less"
        )


@functools.cache
def _enabled(cls: type[nn.Module], family: type[_Model]) -> type[nn.Module]:
    return type(cls.__name__, (family, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _generates(given: dict[str, Any]) -> bool:
    return bool(given["use_cache"]) or given["past_key_values"] is not None


def _bound(function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    return bound.arguments
