"""The forwards of enabled models, family by family, and of their attention layers.

The class of a family is put before the model's own class, and shares its attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import model_center.model as zoo
import torch
from model_center.layer import Attention
from torch import Tensor, nn

from ...attention import burst_attn_func
from ...calls.refusal import CALL, bind_arguments
from ...nn import apply_rope, rope_tables
from ...ranks.agreement import refuse
from ...ranks.sequence_parallel import SequenceParallel
from ...sequence.rows import Layouts, Masks
from ..batch import Batch, LocalPart, agree_on_batch


@dataclass(frozen=True)
class CallContext:
    """The argument that layers get instead of a mask."""

    options: dict[str, Any]  # of burst_attn_func
    rotate: Callable[[Tensor], Tensor]  # rotates q or k (B, S_local, H, D)


class RingAttention(Attention):
    """ModelCenter's attention with its parameters, over the ranks of `_sp`."""

    def forward(
        self,
        query: Tensor,
        key_value: Tensor,
        attention_mask: CallContext | Tensor,
        position_bias: Any = None,
        use_cache: bool = False,
        past_key_value: Any = None,
    ) -> Any:
        """Map query and key_value (B, S_local, E) to (B, S_local, E), perhaps with a bias (R, H).
        With a tensor as mask, call the attention of one rank.
        """
        if not isinstance(attention_mask, CallContext):
            if self._sp.size > 1:
                raise TypeError(
                    f"attention over {self._sp.size} ranks got a {type(attention_mask).__name__} "
                    "as its mask: call the enabled model, not its layers"
                )
            return super().forward(
                query, key_value, attention_mask, position_bias, use_cache, past_key_value
            )
        if self.training and self.attention_dropout is not None and self.attention_dropout.p:
            error = ValueError(
                "attention over ranks cannot drop probabilities, and dropout_p is "
                f"{self.attention_dropout.p}: build the model with dropout_p=0, or call its eval()"
            )
            refuse(self._sp.rings, CALL, error)
        projected = self.project_q(query), self.project_k(key_value), self.project_v(key_value)
        q, k, v = (x.unflatten(-1, (-1, self.dim_head)) for x in projected)
        if self.pos_bias_type == "rotary":
            q, k = attention_mask.rotate(q), attention_mask.rotate(k)
        scale = None if self.attn_scale else 1.0
        out = burst_attn_func(q, k, v, scale, **attention_mask.options, bias=position_bias)
        return self.attention_out(out.flatten(2))


class EnabledModel(nn.Module):
    """The forward of an enabled model over the ranks of `_sp`."""

    # set by enable
    _sp: SequenceParallel
    _exact_rotary: bool
    _options: dict[str, Any]

    # arguments of the model's forward with values for each token, and marks of a LocalPart
    of_tokens: tuple[str, ...] = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
    marks: tuple[str, ...] = ("attention_mask",)
    causal = True  # tokens see the tokens before them, otherwise all
    padding_sees = True  # padding sees the tokens that are not padding
    pos_bias_types: tuple[str, ...] = ("none",)  # those that its attention layers may have

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the model, of any type."""

    @staticmethod
    def check(model: Any) -> None:
        """Raise ValueError if the options of a model are not supported."""

    def forward(
        self, *args: Any, mask: Masks | None = None, layout: Layouts | None = None, **named: Any
    ) -> Any:
        """Run the model's own forward on this rank's tokens; see the package."""
        own = super().forward
        if self._sp.size == 1 and _generates(self._bind(args, named)):
            if mask is not None or layout is not None:
                raise ValueError(
                    "expected a cache or mask and layout, got both: the new tokens attend to all "
                    "of past_key_values"
                )
            return own(*args, **named)

        def make_part() -> LocalPart:
            given = self._bind(args, named)
            self._check(given)
            tensors = {name: given[name] for name in self.of_tokens if name in given}
            marks = {name: given[name] for name in self.marks}
            return LocalPart(self._sp, tensors, given["length"], mask, layout, marks)

        batch = agree_on_batch(self._sp, f"the forward of a {type(self).__name__}", make_part)
        given = self._bind(args, named)
        hidden = self._embed(given, batch)
        options = self._options | self._sp.groups | self._mask_options(batch, hidden.device)
        context = CallContext(options, self._rotation(batch, hidden))
        hidden = self._run_layers(hidden, context, self._bias_table(hidden.device))
        return self._output(given, hidden)

    def _bind(self, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's own forward by name, with defaults."""
        signature = inspect.signature(super().forward)
        bound = bind_arguments(f"{type(self).__name__}.forward", signature, args, named)
        bound.apply_defaults()
        return bound.arguments

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"an enabled {type(self).__name__} cannot be copied or pickled, as torch.save does: "
            "save its weights with bmtrain.save, and load them into a model before it is enabled"
        )

    def _check(self, given: dict[str, Any]) -> None:
        """Raise ValueError for arguments that need whole sequences."""
        if _generates(given):
            raise ValueError(
                "use_cache and past_key_values need whole sequences, and these are cut over "
                f"{self._sp.size} ranks: generate with a model that is not enabled, or that is "
                "enabled for one rank"
            )

    def _mask_options(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return the options of burst_attn_func with the visible pairs."""
        return batch.options("mask", lambda row: row.visible(self.causal, self.padding_sees))

    def _bias_table(self, device: torch.device) -> Tensor | None:
        """Return the bias (R, H) for the scores of _mask_options, if any."""
        return None

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        """Return the input of the layers, (B, S_local, E)."""
        return self._embed_tokens(given)

    def _embed_tokens(self, given: dict[str, Any]) -> Tensor:
        embeds = given["inputs_embeds"]
        return self.input_embedding(given["input_ids"]) if embeds is None else embeds

    def _rotation(self, batch: Batch, hidden: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the rotation of q and k, for hidden states on their device and in their dtype."""
        return lambda x: x

    def _run_layers(self, hidden: Tensor, context: CallContext, bias: Tensor | None) -> Tensor:
        return self.encoder(hidden, context, bias)

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


class RotaryModel(EnabledModel):
    """A model with rotary embeddings of positions."""

    pos_bias_types = ("rotary", "none")

    def _rotation(self, batch: Batch, hidden: Tensor) -> Callable[[Tensor], Tensor]:
        whole = [row.positions() for row in batch.rows]
        # ModelCenter computes angles in the dtype of the frequencies, if a model keeps these.
        dtype = getattr(self.position_bias, "inv_freq", hidden).dtype
        last = max(int(x.max()) for x in whole)
        if last > torch.finfo(dtype).max and not self._exact_rotary:
            raise ValueError(
                f"position {last} is infinite in {dtype}, in which ModelCenter computes the angles "
                "of rotary embeddings: enable the model with exact_rotary=True"
            )
        positions = batch.shard(whole).to(hidden.device)
        if self._exact_rotary:
            cos, sin = self._exact_tables(positions)
        else:
            angles = self._angles(positions, dtype)
            cos, sin = angles.cos().float(), angles.sin().float()
        return lambda x: self._rotate(x, cos, sin)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the angles as ModelCenter rounds them."""
        raise NotImplementedError

    def _exact_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the exact angles."""
        raise NotImplementedError

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(x, cos, sin)


class Llama(RotaryModel):
    """Llama. Positions and angles are rounded to the dtype of the frequencies."""

    padding_sees = False

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        scaled = positions.to(dtype) * self.position_bias.distance_scale
        return scaled.unsqueeze(-1) * self.position_bias.inv_freq.to(positions.device)

    def _exact_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self.position_bias
        return rope_tables(positions * rotary.distance_scale, 2 * len(rotary.inv_freq), rotary.base)


class GPTj(RotaryModel):
    """GPTj. It rotates the first entries of a head in pairs, by angles rounded to its dtype."""

    @property
    def _rotated(self) -> int:
        return min(self.position_bias.rotary_dim, self.config.dim_head)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        # on the CPU, since GPUs round differently
        frequencies = 1.0 / 10000 ** (torch.arange(0, self._rotated, 2) / self._rotated)
        return (positions.float().unsqueeze(-1) * frequencies.to(positions.device)).to(dtype)

    def _exact_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self._rotated)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        # This reorders the entries of q and of k in the same way, so their products stay.
        halves = torch.cat((rotated[..., ::2], rotated[..., 1::2]), -1)
        return torch.cat((apply_rope(halves, cos, sin), rest), -1)


class LearnedPositionModel(EnabledModel):
    """A model that adds learned embeddings of positions to the embeddings of tokens."""

    def _embed(self, given: dict[str, Any], batch: Batch) -> Tensor:
        hidden = self._embed_tokens(given)
        ids = given["position_ids"]
        if ids is None:
            ids = self._position_ids(batch).to(hidden.device)
        return self.embed_dropout(hidden + self.position_embedding(ids))

    def _position_ids(self, batch: Batch) -> Tensor:
        """Return (S_local,), or (B, S_local) if rows differ, on the CPU."""
        whole = list(self._whole_position_ids(batch))
        last = max(int(x.max()) for x in whole)
        count = self.position_embedding._parameters["weight"]._original_shape[0]
        if last >= count:
            raise ValueError(
                f"this {type(self).__name__} has embeddings of {count} positions, got position "
                f"{last}"
            )
        return batch.shard(whole)

    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        """Return (S,) for each row."""
        return (row.positions() for row in batch.rows)


class OPT(LearnedPositionModel):
    """OPT. It counts only tokens that are not padding, from 2. Padding has position 1."""

    def _run_layers(self, hidden: Tensor, context: CallContext, bias: Tensor | None) -> Tensor:
        return self.decoder(hidden, context, bias)

    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        for row in batch.rows:
            padding = torch.ones(row.layout.seq_len, dtype=torch.bool)
            for start, stop in row.valid:
                padding[start:stop] = False
            positions = padding.logical_not().cumsum(0) - 1 if row.mask is None else row.positions()
            yield (positions + 2).masked_fill(padding, 1)


class Bert(LearnedPositionModel):
    """Bert, which is not causal and adds embeddings of token types."""

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
                "output_pooler_output is computed from the first token, which only one of "
                f"{self._sp.size} ranks has"
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
        if self.config.tied:
            return self.lm_head(hidden, self.input_embedding)
        return self.lm_head(hidden)


class Roberta(Bert):
    """Roberta. Its positions start after padding_idx."""

    def _whole_position_ids(self, batch: Batch) -> Iterator[Tensor]:
        return (row.positions() + self.padding_idx + 1 for row in batch.rows)


def _generates(given: dict[str, Any]) -> bool:
    return bool(given["use_cache"]) or given["past_key_values"] is not None
