"""Configuration of CPM-Live's models, under its names of the fields, and presets."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from models.fields import check_fields, check_size, check_sizes

MaskModules = tuple[tuple[bool, bool], ...]

# Names in Hugging Face's configurations (transformers' CpmAnt, the code of openbmb/cpm-bee-10b)
HF_KINDS = {"cpmbee": "cpm-bee", "cpmant": "cpm-ant"}
HF_FIELDS = {
    "dim_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
_DISTANCE_SCALE = 16  # positions by which a sub-id of 1 rotates, in Hugging Face's CpmBee

# CPM-Live's fields that are not used here. The engine decides the dtype.
_NOT_OURS = ("dropout_p", "half")


@dataclass(frozen=True, kw_only=True)
class LiveConfig(ABC):
    """The shape of a CPM-Live model. All arguments are keywords.

    dim_model, dim_ff             width of the hidden states, and inside the feed-forward
    num_heads, dim_head           of the attention; their product need not be dim_model
    position_bias_num_buckets     rows of the bias table for pairs of one segment, by distance; see
    position_bias_max_distance    bmt_burst.scores.distance_rows
    eps                           of the norms
    mask_modules                  for each layer whether its attention is left out, and whether its
                                  feed-forward is
    residual_divisor              divides each residual sum: 1.05 for CPM-Bee; 1.0 for CPM-Ant, as
                                  its released weights need, though CPM-Live's files do not say it

    Raises ValueError for values of another type, out of range, or that contradict each other.
    """

    model_type: ClassVar[str]

    vocab_size: int = 30720
    dim_model: int = 4096
    num_heads: int = 64
    dim_head: int = 64
    dim_ff: int = 10240
    num_layers: int = 32
    position_bias_num_buckets: int = 256
    position_bias_max_distance: int = 2048
    eps: float = 1e-6
    mask_modules: MaskModules | None = None
    residual_divisor: float = 1.05

    def __post_init__(self):
        check_fields(self)
        buckets, most = self.position_bias_num_buckets, self.position_bias_max_distance
        if buckets < 4:
            raise ValueError(f"position_bias_num_buckets must be at least 4, got {buckets}")
        if most <= buckets // 4:
            raise ValueError(
                f"position_bias_max_distance must be more than the {buckets // 4} distances that "
                f"have a bucket each, got {most}"
            )
        if self.mask_modules is not None:
            pairs = _mask_modules(self.mask_modules, self.num_layers)
            object.__setattr__(self, "mask_modules", pairs)
        check_size(self.num_parameters)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from CPM-Live's JSON or `to_dict`. Raises ValueError for others."""
        values = dict(values)
        if (found := values.pop("model_type", cls.model_type)) != cls.model_type:
            raise ValueError(
                f"expected a configuration of {cls.model_type!r}, got one of {found!r}"
            )
        if dropout := values.get("dropout_p"):
            raise ValueError(f"dropout_p must be 0, dropout is not supported, got {dropout!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in cls._accepted(values, known).items() if k not in _NOT_OURS})

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from Hugging Face's config.json. Raises ValueError for others."""
        ours = {theirs: name for name, theirs in HF_FIELDS.items()}
        check_sizes(values, ("vocab_size", *ours), ())
        if (scale := values.get("distance_scale", _DISTANCE_SCALE)) != _DISTANCE_SCALE:
            raise ValueError(f"distance_scale must be {_DISTANCE_SCALE}, got {scale!r}")
        fields = {field.name for field in dataclasses.fields(cls)} | {*_NOT_OURS}
        renamed = {ours.get(name, name): value for name, value in values.items()}
        renamed.setdefault("half", values.get("dtype", values.get("torch_dtype")) == "float16")
        return cls.from_dict({name: value for name, value in renamed.items() if name in fields})

    @classmethod
    def _accepted(cls, values: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """Return the values of known fields. Raises ValueError for others."""
        if unknown := sorted(values.keys() - known - {*_NOT_OURS}):
            raise ValueError(f"unknown fields {unknown} in a configuration of {cls.model_type}")
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `model_type`, in JSON's types."""
        return {"model_type": self.model_type, **dataclasses.asdict(self)}

    @property
    def parts(self) -> MaskModules:
        """For each layer whether it has an attention, and whether it has a feed-forward."""
        dropped = self.mask_modules or ((False, False),) * self.num_layers
        return tuple((not attention, not feed_forward) for attention, feed_forward in dropped)

    @property
    @abstractmethod
    def num_bias_rows(self) -> int:
        """Rows of the bias table."""

    @property
    def num_looked_up(self) -> int:
        """The number of parameters in tables that are only looked up."""
        return 0

    @property
    def num_attentions(self) -> int:
        """Layers with an attention."""
        return sum(attention for attention, _ in self.parts)

    @property
    def num_multiplied(self) -> int:
        """Entries of the matrices that multiply each token."""
        attention, feed_forward = 4 * self.num_heads * self.dim_head, 3 * self.dim_ff
        layers = sum(a * attention + f * feed_forward for a, f in self.parts)
        return self.dim_model * (layers + self.vocab_size)

    @property
    def num_parameters(self) -> int:
        norms = self.dim_model * (sum(map(sum, self.parts)) + 1)
        table = self.num_bias_rows * self.num_heads
        return self.num_multiplied + self.num_looked_up + norms + table

    @property
    def head_dim(self) -> int:
        """dim_head. This property and the next ones have the names of other configurations."""
        return self.dim_head

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def hidden_size(self) -> int:
        return self.dim_model


@dataclass(frozen=True, kw_only=True)
class BeeConfig(LiveConfig):
    """The shape of a CPM-Bee.

    position_bias_num_segment_buckets  rows of the bias table for pairs of different segments
    fp16_rotary                        whether the rotation by sub-ids rounds its frequencies,
                                       angles, sines and cosines to fp16; sub-ids must be below 4095

    CPM-Live rounds so in a model that is `half`. Both released models, cpm-bee-3b and cpm-bee-10b,
    were trained with it, and their presets and files have it. An angle is off by 0.004 at sub-id 1,
    by 0.25 at 64, by 1 at 256. New training is better without it, and must be without it for
    sub-ids of 4095 and more.
    """

    model_type: ClassVar[str] = "cpm-bee"

    position_bias_num_segment_buckets: int = 256
    fp16_rotary: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.dim_model % 2:
            raise ValueError(
                f"dim_model must be even, since sub-ids rotate its halves, got {self.dim_model}"
            )

    @classmethod
    def _accepted(cls, values: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """Return the values of known fields. CPM-Live's `half` also decides fp16_rotary."""
        rotary = {"fp16_rotary": values["half"]} if "half" in values else {}
        return super()._accepted(rotary | values, known)

    @property
    def num_bias_rows(self) -> int:
        return self.position_bias_num_buckets + self.position_bias_num_segment_buckets


@dataclass(frozen=True, kw_only=True)
class AntConfig(LiveConfig):
    """The shape of a CPM-Ant.

    prompt_types, prompt_length  the number of learned prompts, one for each task, and their tokens
    segment_types                types of segments; each pair of different types has a row of the
                                 bias table
    """

    model_type: ClassVar[str] = "cpm-ant"

    position_bias_num_buckets: int = 512
    residual_divisor: float = 1.0
    prompt_types: int = 32
    prompt_length: int = 32
    segment_types: int = 32

    @classmethod
    def _accepted(cls, values: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """Return the values of known fields. Files have others, which CPM-Live ignores, too."""
        return {name: value for name, value in values.items() if name in known}

    @property
    def num_bias_rows(self) -> int:
        return self.position_bias_num_buckets + self.segment_types**2

    @property
    def num_looked_up(self) -> int:
        return self.dim_model * (self.prompt_types * self.prompt_length + self.segment_types)


def _mask_modules(value: Any, num_layers: int) -> MaskModules:
    """Convert to tuples. Raises ValueError unless each layer has a pair of bools, or of 0 and 1."""
    given = value if isinstance(value, list | tuple) else ()
    pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in given]
    if len(pairs) != num_layers or any(len(pair) != 2 or not {*pair} <= {0, 1} for pair in pairs):
        raise ValueError(
            "mask_modules must be (no attention, no feed-forward) for each of "
            f"{num_layers} layers, got {value}"
        )
    return tuple((bool(attention), bool(feed_forward)) for attention, feed_forward in pairs)


def _sizes(*sizes: int) -> dict[str, Any]:
    names = "vocab_size", "dim_model", "num_heads", "dim_head", "dim_ff", "num_layers"
    return dict(zip(names, sizes, strict=True))


_TINY = _sizes(320, 128, 4, 32, 384, 4)
_TINY |= {"position_bias_num_buckets": 64, "position_bias_max_distance": 512}
PRESETS: dict[str, LiveConfig] = {
    # For a laptop: bytes as tokens.
    "cpm-bee-tiny": BeeConfig(**_TINY, position_bias_num_segment_buckets=64),
    "cpm-ant-tiny": AntConfig(**_TINY, prompt_types=4, prompt_length=8, segment_types=4),
    # The released models, with the options of their training.
    "cpm-bee-3b": BeeConfig(**_sizes(86580, 2560, 32, 80, 3072, 32), fp16_rotary=True),
    "cpm-bee-10b": BeeConfig(**_sizes(86583, 4096, 32, 128, 10240, 48), fp16_rotary=True),
    "cpm-ant-10b": AntConfig(**_sizes(30720, 4096, 32, 128, 10240, 48)),
}
