"""Configuration of the CPM family, dense or hybrid, and presets."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bmt_burst import InfLLMV2
from bmt_burst.extensions import check_extension, read_extension, write_extension
from bmt_burst.strategies.extension import Extension

from .fields import check_fields, check_names, check_size
from .rope import Llama3, LongRope, RopeScaling

ATTENTION, LIGHTNING = "attention", "lightning"
_KIND = "cpm"  # the model_type of configurations


@dataclass(frozen=True)
class CPMConfig:
    """The shape and scalings of a CPM.

    This is the MiniCPM family. With its scalings off it is a Llama, Qwen2 or Qwen3. Layers may have
    lightning attention instead of softmax attention, as in MiniCPM-SALA.

    rope_scaling    how rotary positions are scaled: a RopeScaling, or its to_dict
    qkv_bias        whether the projections to q, k and v have a bias; o_bias is the same for the
                    projection after the attention, mlp_bias for the feed-forward
    qk_norm         whether q and k are normalized in each head before they are rotated
    scale_emb       factor of the embeddings
    scale_depth     every residual branch is scaled by scale_depth / sqrt(num_layers); None: by 1
    dim_model_base  logits are divided by hidden_size / dim_model_base; None: by 1
    init_std        standard deviation of embeddings; matrices have this, divided by
                    sqrt(hidden_size / dim_model_base)
    window          how many tokens a token sees, itself included, in layers with a window; None: no
                    layer has one
    window_pattern  which layers have a window: a letter for each layer, "w", or "f" for a full
                    layer, repeated. "w" is all layers, "wwwf" all except every fourth
    max_position_embeddings  tokens of the longest sequence that the weights were made for, or None
                    if that is not known. It changes no result
    sparse          the extension of all layers with softmax attention, such as InfLLMV2(), or its
                    names and values (bmt_burst.extensions); None: attention is dense
    mixers          the mixer of each layer: "attention", or "lightning" for bmt_burst.nn's
                    LightningAttention with num_heads, norms, rotary positions and a gate, as in
                    MiniCPM-SALA. None: all layers have softmax attention, which num_kv_heads,
                    biases, qk_norm and the next two are for. Lightning layers exclude a window
    attention_rotary  whether softmax attention has rotary positions
    rotary_pattern  in which layers it has: a letter for each layer, "r", or "n" for none, repeated.
                    SmolLM3 has "rrrn"
    softmax_scale   factor of the scores of softmax attention; None: 1 / sqrt(head_dim)
    family          the model_type of the Hugging Face folder that it was read from, which an export
                    has again if it fits. It changes no result
    attention_gate  whether it is multiplied by the sigmoid of a projection of the layer's input

    MiniCPM, arXiv 2404.06395, appendix A.1, defines the scalings. Raises ValueError for values of
    another type, out of range, or that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    scale_emb: float = 1.0
    scale_depth: float | None = None
    dim_model_base: float | None = None
    init_std: float = 0.02
    window: int | None = None
    window_pattern: str = "w"
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int | None = None
    sparse: Extension | None = None
    mixers: tuple[str, ...] | None = None
    attention_rotary: bool = True
    attention_gate: bool = False
    rotary_pattern: str = "r"
    softmax_scale: float | None = None
    family: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_fields(self)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} does not divide num_heads={heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, got {self.head_dim}")
        self._take("rope_scaling", RopeScaling, RopeScaling.from_dict)
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.head_dim, self.rope_theta)
        self._take("sparse", Extension, read_extension)
        self._check_mixers()
        self._check_windows()
        self._check_rotary()
        check_size(self.num_parameters)

    def _check_mixers(self) -> None:
        if self.mixers is None:
            return
        known = isinstance(self.mixers, list | tuple) and all(
            mixer in (ATTENTION, LIGHTNING) for mixer in self.mixers
        )
        if not known or len(self.mixers) != self.num_layers:
            raise ValueError(
                f"mixers must be {ATTENTION} or {LIGHTNING} for each of {self.num_layers} layers, "
                f"got {self.mixers!r}"
            )
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if self.window is not None and self.lightning_layers:
            raise ValueError(
                f"expected a window or lightning layers, got window={self.window} and "
                f"{self.lightning_layers} lightning layers, which have no window"
            )

    def _check_windows(self) -> None:
        window, pattern, layers = self.window, self.window_pattern, self.num_layers
        if self.sparse is not None:
            check_extension(self.sparse).for_layer(rotary=True, window=window, softcap=None)
        if not {"w"} <= set(pattern) <= {"w", "f"}:
            raise ValueError(
                f"window_pattern must consist of w and f, with at least one w, got {pattern!r}"
            )
        if len(pattern) > layers:
            raise ValueError(f"window_pattern={pattern!r} is longer than num_layers={layers}")
        if window is None and "f" in pattern:
            raise ValueError(f"window_pattern={pattern!r} needs a window, got window=None")

    def _check_rotary(self) -> None:
        pattern = self.rotary_pattern
        if not pattern or set(pattern) - {"r", "n"} or len(pattern) > self.num_layers:
            raise ValueError(
                f"rotary_pattern must be r or n for at most {self.num_layers} layers, got "
                f"{pattern!r}"
            )
        if not self.attention_rotary and "n" in pattern:
            raise ValueError(
                "expected rotary_pattern or attention_rotary=False, got both: no layer has rotary "
                "positions without"
            )

    def _take(self, name: str, kind: Any, read: Callable[[dict[str, Any]], Any]) -> None:
        """Make the field `name` a `kind`, which may be given as names and values that `read` takes.
        Raises ValueError.
        """
        value = getattr(self, name)
        try:
            value = read(value) if isinstance(value, dict) else value
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        if value is not None and not isinstance(value, kind):
            expected = f"{kind.__name__} or its names and values"
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        object.__setattr__(self, name, value)

    def untied(self) -> Self:
        """Return this configuration with a head of its own. Raises ValueError if it has one."""
        if not self.tie_embeddings:
            raise ValueError("expected a model with tied embeddings to untie, got one with a head")
        return dataclasses.replace(self, tie_embeddings=False)

    @property
    def residual_scale(self) -> float:
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_layers)

    @property
    def width_scale(self) -> float:
        return 1.0 if self.dim_model_base is None else self.hidden_size / self.dim_model_base

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None for a full layer."""
        letters = _repeat(self.window_pattern, self.num_layers)
        return tuple(self.window if letter == "w" else None for letter in letters)

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions, if it has softmax attention."""
        letters = _repeat(self.rotary_pattern, self.num_layers)
        return tuple(self.attention_rotary and letter == "r" for letter in letters)

    @property
    def mixer_of_layers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        return self.mixers or (ATTENTION,) * self.num_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention."""
        return tuple(i for i, mixer in enumerate(self.mixer_of_layers) if mixer == ATTENTION)

    def one_layer_of_each_kind(self) -> Self:
        """Return this configuration with only the first layer of each kind: they differ in mixers,
        windows and rotary positions.
        """
        kinds = zip(self.mixer_of_layers, self.windows, self.rotary_layers, strict=True)
        mixers, windows, rotary = zip(*dict.fromkeys(kinds), strict=True)
        return dataclasses.replace(
            self,
            num_layers=len(mixers),
            mixers=mixers if self.mixers else None,
            window_pattern="".join("fw"[window == self.window] for window in windows),
            rotary_pattern="".join("rn"[self.attention_rotary and not x] for x in rotary),
        )

    @property
    def lightning_layers(self) -> int:
        """The number of layers with lightning attention."""
        return self.mixers.count(LIGHTNING) if self.mixers else 0

    @property
    def keeps_results(self) -> bool:
        """Whether some attention exchanges what recomputations should not exchange again."""
        return self.sparse is not None or self.lightning_layers > 0

    @property
    def infllm(self) -> InfLLMV2 | None:
        """The sparse attention whose costs plans know. Other extensions count as dense."""
        return self.sparse if isinstance(self.sparse, InfLLMV2) else None

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence that the weights were made for, or that their scaling extends to."""
        if self.max_position_embeddings is None:
            return None
        extended = self.rope_scaling and self.rope_scaling.extended_length
        return max(self.max_position_embeddings, extended or 0)

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        matrices, _ = self._count_layers()
        return matrices + embeddings + self.num_vector_parameters

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """The parameters of each layer."""
        return tuple(sum(self._count_layer(mixer)) for mixer in self.mixer_of_layers)

    @property
    def num_vector_parameters(self) -> int:
        """Parameters of norms and biases, which are not matrices."""
        _, vectors = self._count_layers()
        return vectors + self.hidden_size

    def _count_layers(self) -> tuple[int, int]:
        """Count the parameters of all layers in matrices, and those in norms and biases."""
        of_lightning = self.lightning_layers  # sizes are not checked yet: there may be 10^15 layers
        counts = {ATTENTION: self.num_layers - of_lightning, LIGHTNING: of_lightning}
        found = [(n, *self._count_layer(mixer)) for mixer, n in counts.items()]
        return sum(n * matrices for n, matrices, _ in found), sum(n * x for n, _, x in found)

    def _count_layer(self, mixer: str) -> tuple[int, int]:
        """Count the parameters of a layer in matrices, and those in norms and biases."""
        matrices, vectors = self._count_mixer(mixer)
        matrices += 3 * self.hidden_size * self.intermediate_size
        vectors += 2 * self.hidden_size
        vectors += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return matrices, vectors

    def _count_mixer(self, mixer: str) -> tuple[int, int]:
        width, of_keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if mixer == LIGHTNING:
            return 5 * self.hidden_size * width, 2 * self.head_dim + width
        columns = (2 + self.attention_gate) * width + 2 * of_keys
        vectors = self.qkv_bias * (width + 2 * of_keys) + self.o_bias * self.hidden_size
        return self.hidden_size * columns, vectors + self.qk_norm * 2 * self.head_dim

    @property
    def num_multiplied(self) -> int:
        """Entries of the matrices that multiply each token: no vectors, no looked up rows."""
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - self.num_vector_parameters - looked_up

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the arguments of CPMConfig, with or without their `model_type`.
        Raises ValueError for others.
        """
        values = dict(values)
        if (found := values.pop("model_type", _KIND)) != _KIND:
            raise ValueError(f"expected a configuration of {_KIND!r}, got one of {found!r}")
        check_names(cls, values, "expected the fields of CPMConfig")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of CPMConfig and the kind of model, in JSON's types."""
        scaling = self.rope_scaling
        return dataclasses.asdict(self) | {
            "model_type": _KIND,
            "rope_scaling": None if scaling is None else scaling.to_dict(),
            "sparse": None if self.sparse is None else write_extension(self.sparse),
            "mixers": None if self.mixers is None else list(self.mixers),
        }


def _repeat(pattern: str, count: int) -> Iterable[str]:
    return itertools.islice(itertools.cycle(pattern), count)


def shortest_pattern(letters: str) -> str:
    """Return the shortest pattern that gives these letters if it is repeated."""
    starts = (letters[:count] for count in range(1, len(letters) + 1))
    return next(start for start in starts if (start * len(letters)).startswith(letters))


_MINICPM: dict[str, Any] = {
    "scale_emb": 12.0,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "init_std": 0.1,
}
# LongRoPE's divisors, the same for short and long sequences: MiniCPM4's by head size, from its
# config.json, and MiniCPM4.1's, from its README (github.com/OpenBMB/MiniCPM), up to 131,072 tokens
_DIVISORS = json.loads(Path(__file__).with_name("minicpm4.json").read_text())
_MINICPM4_SMALL, _MINICPM4, _MINICPM41 = (
    LongRope(_DIVISORS[name], _DIVISORS[name], length)
    for name, length in (("minicpm4-64", 32768), ("minicpm4-128", 32768), ("minicpm4.1", 65536))
)
_LLAMA3: dict[str, Any] = {"rope_theta": 500000.0}
_LLAMA31, _LLAMA32 = (
    _LLAMA3 | {"rope_scaling": Llama3(factor, 1.0, 4.0, 8192)} for factor in (8.0, 32.0)
)
_MINICPM5: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "tie_embeddings": False}
_QWEN2: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "qkv_bias": True}
_QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "qk_norm": True}
_UNTIED: dict[str, Any] = {"tie_embeddings": False}
# MiniCPM-SALA's layers
_SALA: dict[str, Any] = {"attention_rotary": False, "attention_gate": True}
_SALA_MIXERS = tuple(
    ATTENTION if layer in (0, 9, 16, 17, 22, 29, 30, 31) else LIGHTNING for layer in range(32)
)
# fmt: off
PRESETS = {
    # For a laptop: trains in minutes on two cores, bytes as tokens.
    "cpm-tiny": CPMConfig(
        320, 128, 384, 4, 4, 2, 32, scale_emb=12.0, scale_depth=1.4, dim_model_base=64, init_std=0.1
    ),
    # The same with three lightning layers.
    "sala-tiny": CPMConfig(
        320, 128, 384, 4, 4, 2, 32,
        scale_emb=12.0, scale_depth=1.4, dim_model_base=64, init_std=0.1, rms_norm_eps=1e-6,
        mixers=(LIGHTNING, ATTENTION, LIGHTNING, LIGHTNING), **_SALA,
    ),
    "minicpm-1b": CPMConfig(73440, 1536, 3840, 52, 24, 8, 64, **_MINICPM),
    "minicpm-2b": CPMConfig(122753, 2304, 5760, 40, 36, 36, 64, **_MINICPM),
    "minicpm4-0.5b": CPMConfig(
        73448, 1024, 4096, 24, 16, 2, 64, rope_scaling=_MINICPM4_SMALL, **_MINICPM
    ),
    "minicpm4-8b": CPMConfig(
        73448, 4096, 16384, 32, 32, 2, 128,
        rms_norm_eps=1e-6, rope_scaling=_MINICPM4, **_UNTIED, **_MINICPM,
    ),
    # No public config.json was at hand. The README has LongRoPE and sparse_config; the rest is
    # minicpm4-8b's.
    "minicpm4.1-8b": CPMConfig(
        73448, 4096, 16384, 32, 32, 2, 128,
        rms_norm_eps=1e-6, rope_scaling=_MINICPM41, sparse=InfLLMV2(), **_UNTIED, **_MINICPM,
    ),
    "minicpm-sala": CPMConfig(
        73448, 4096, 16384, 32, 32, 2, 128,
        rms_norm_eps=1e-6, sparse=InfLLMV2(), mixers=_SALA_MIXERS, **_SALA, **_UNTIED, **_MINICPM,
    ),
    "minicpm5-1b": CPMConfig(130560, 1536, 4608, 24, 16, 2, 128, **_MINICPM5),
    # rms_norm_eps is minicpm5-1b's. Public code repeats the rest of its config.json.
    "minicpm5-2b": CPMConfig(130560, 2048, 6144, 42, 16, 2, 128, **_MINICPM5),
    "llama3-8b": CPMConfig(128256, 4096, 14336, 32, 32, 8, 128, **_LLAMA3, **_UNTIED),
    "llama3.1-8b": CPMConfig(128256, 4096, 14336, 32, 32, 8, 128, **_LLAMA31, **_UNTIED),
    "llama3.2-1b": CPMConfig(128256, 2048, 8192, 16, 32, 8, 64, **_LLAMA32),
    "llama3.2-3b": CPMConfig(128256, 3072, 8192, 28, 24, 8, 128, **_LLAMA32),
    "qwen2.5-7b": CPMConfig(152064, 3584, 18944, 28, 28, 4, 128, **_QWEN2, **_UNTIED),
    "qwen3-0.6b": CPMConfig(151936, 1024, 3072, 28, 16, 8, 128, **_QWEN3),
    "qwen3-1.7b": CPMConfig(151936, 2048, 6144, 28, 16, 8, 128, **_QWEN3),
    "qwen3-4b": CPMConfig(151936, 2560, 9728, 36, 32, 8, 128, **_QWEN3),
    "qwen3-8b": CPMConfig(151936, 4096, 12288, 36, 32, 8, 128, **_QWEN3, **_UNTIED),
    # Shapes of papers on long contexts: Llama 7B, and its 13B with a vocabulary of 120K.
    "7b": CPMConfig(32000, 4096, 11008, 32, 32, 32, 128, **_UNTIED),
    "14b": CPMConfig(120000, 5120, 13824, 40, 40, 40, 128, **_UNTIED),
}
# fmt: on
