"""The forwards of models of ModelCenter, family by family."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import model_center.model as zoo
import torch
from torch import Tensor, nn

from ...nn import Layouts, Masks, apply_rope, rope_tables
from ..batch import Batch, Given, agree
from .attention import _Sight


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


def _generates(given: dict[str, Any]) -> bool:
    return bool(given["use_cache"]) or given["past_key_values"] is not None


def _bound(function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    return bound.arguments
