"""Weights from and to folders as Hugging Face keeps them: config.json and *.safetensors.

    model = load_cpm("MiniCPM-2B-sft-bf16")            # a Llama's folder too
    save_weights("exported", model.config, model.state_dict())

Parameters keep Hugging Face's names but for the leading "model.", so a conversion is a renaming. A config without
MiniCPM's scalings is written as a Llama's, one with them as a MiniCPM's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import CPMConfig
from .cpm import CPM

_PREFIX = "model."
_OUTSIDE_PREFIX = "lm_head."
_SAME_NAME = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")
_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


class HFWeights(Mapping[str, Tensor]):
    """The weights in a folder under this project's names, each read when it is asked for.

    Raises ValueError if the folder's config is of a model that CPM does not compute, or its weights are not exactly
    those of that config.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._files = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = safe_open(path, "pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        self._check()

    def __getitem__(self, name: str) -> Tensor:
        return self._files[_to_hf(name)].get_tensor(_to_hf(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def _check(self) -> None:
        self._expected = {name: tuple(p.shape) for name, p in _meta_model(self.config).named_parameters()}
        found = {
            _from_hf(n): tuple(f.get_slice(n).get_shape()) for n, f in self._files.items() if "rotary_emb" not in n
        }
        if self.config.tie_embeddings:
            found.pop("lm_head.weight", None)  # some writers keep the tied copy
        missing, surplus = sorted(self._expected.keys() - found.keys()), sorted(found.keys() - self._expected.keys())
        if missing or surplus:
            raise ValueError(f"{self.folder}: missing weights {missing[:5]}, unexpected weights {surplus[:5]}")
        for name, shape in self._expected.items():
            if found[name] != shape:
                raise ValueError(f"{self.folder}: {name} has shape {found[name]}, its config means {shape}")


def load_cpm(folder: str | Path, dtype: torch.dtype = torch.float32) -> CPM:
    """The model in a Hugging Face folder, whole, on the CPU."""
    weights = HFWeights(folder)
    model = _meta_model(weights.config)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return model


def save_weights(folder: str | Path, config: CPMConfig, weights: Mapping[str, Tensor]) -> None:
    """Writes config.json and *.safetensors (split at 5 GB) for `weights` under this project's names."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_torch_state_dict({_to_hf(name): w.contiguous() for name, w in weights.items()}, folder)
    (Path(folder) / "config.json").write_text(json.dumps(config_to_hf(config), indent=2) + "\n")


def read_config(folder: Path) -> CPMConfig:
    """The configuration in a Hugging Face folder. Raises ValueError if CPM does not compute that model."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face model folder")
    try:
        hf = json.loads(file.read_text())
        if not isinstance(hf, dict):
            raise ValueError(f"it holds a {type(hf).__name__}, not names and values")
        return config_from_hf(hf)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def config_from_hf(hf: dict[str, Any]) -> CPMConfig:
    """CPMConfig of a Llama's or MiniCPM's config.json."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    unsupported = {
        "model_type": hf.get("model_type") not in ("llama", "minicpm"),
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "num_experts": bool(hf.get("num_experts")),
        "rope_parameters": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    if refused := [name for name, is_refused in unsupported.items() if is_refused]:
        values = {name: hf.get(name) for name in refused}
        raise ValueError(f"this is not a plain Llama or MiniCPM: {values}, rope {rope}")
    hf = {name: value for name, value in hf.items() if value is not None}
    required = {*_SAME_NAME, *_RENAMED.values()} - {"num_key_value_heads"}
    if missing := sorted(required - hf.keys()):
        raise ValueError(f"config.json lacks {missing}")
    heads = hf["num_attention_heads"]
    sizes = {name: hf[name] for name in _SAME_NAME} | {
        name: hf[theirs] for name, theirs in _RENAMED.items() if theirs in hf
    }
    scalings = {name: hf[name] for name in ("scale_emb", "scale_depth", "dim_model_base") if name in hf}
    return CPMConfig(
        **{"num_kv_heads": heads, **sizes, **scalings},
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        rope_theta=rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        tie_embeddings=hf.get("tie_word_embeddings", hf["model_type"] == "minicpm"),
    )


def config_to_hf(config: CPMConfig) -> dict[str, Any]:
    """config.json's content for `config`."""
    hf: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, name) for name in _SAME_NAME},
        **{theirs: getattr(config, name) for name, theirs in _RENAMED.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if (config.scale_emb, config.residual_scale, config.width_scale) != (1.0, 1.0, 1.0):
        scale_depth = config.residual_scale * config.num_layers**0.5
        base = config.dim_model_base or config.hidden_size
        hf |= {"scale_emb": config.scale_emb, "scale_depth": scale_depth, "dim_model_base": base}
        hf |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}
    return hf


def _meta_model(config: CPMConfig) -> CPM:
    with torch.device("meta"):
        return CPM(config)


def _to_hf(name: str) -> str:
    return name if name.startswith(_OUTSIDE_PREFIX) else _PREFIX + name


def _from_hf(name: str) -> str:
    return name.removeprefix(_PREFIX)
