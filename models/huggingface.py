"""Weights in Hugging Face's folders: config.json and *.safetensors.

    model = load_cpm("MiniCPM4-8B")  # also folders of Llama, Mistral, Qwen2 and Qwen3
    save_weights("exported", model.config, model.state_dict())
    save_weights("as-llama", *fold_scalings(model.config, model.state_dict()))

Parameters have Hugging Face's names without the leading "model.", so a conversion only renames.
models/hf_config.py lists the models. `fold_scalings` removes MiniCPM's scalings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import CPMConfig
from .cpm import CPM
from .hf_config import config_from_hf, config_to_hf

# the code of a MiniCPM's folder, and transformers' class -> its place in it
_CODE = Path(__file__).with_name("modeling_burst_minicpm.py")
_AUTO_MAP = {
    "AutoConfig": f"{_CODE.stem}.MiniCPMConfig",
    "AutoModel": f"{_CODE.stem}.MiniCPMModel",
    "AutoModelForCausalLM": f"{_CODE.stem}.MiniCPMForCausalLM",
}
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PREFIX = "model."
_OUTSIDE_PREFIX = "lm_head."
_DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names of the dtypes that weights may have


class HFWeights(Mapping[str, Tensor]):
    """The weights in a folder under this project's names. Each is read when it is requested.

    If the folder has a model.safetensors.index.json, the weights are in the files that it names.
    Otherwise they are in model.safetensors or, without that, in all *.safetensors. Other files are
    not read.

    Raises ValueError if CPM does not compute the model of the folder's config, if files are
    missing, damaged or have the same weight twice, or if the weights are not exactly those of the
    config, in a floating-point dtype of 16 bits or more. Raises OSError if it may not be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._files = self._indexed() if (self.folder / _INDEX).exists() else self._found()
        self._check()

    def __getitem__(self, name: str) -> Tensor:
        return self._files[_to_hf(name)].get_tensor(_to_hf(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def _indexed(self) -> dict[str, safe_open]:
        """Find the file of each weight in the index."""
        index = self.folder / _INDEX
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{index} has no weight_map of names and files")
        for file in places.values():
            if (
                not isinstance(file, str)
                or not file.endswith(".safetensors")
                or file != os.path.basename(file)
            ):
                raise ValueError(f"{index} must name *.safetensors in its folder, got {file!r}")
        files = {file: _open(self.folder / file) for file in sorted(set(places.values()))}
        held = {file: set(opened.keys()) for file, opened in files.items()}
        for name, file in places.items():
            if name not in held[file]:
                raise ValueError(
                    f"{self.folder / file} does not hold {name}, which {_INDEX} places there"
                )
        return {name: files[file] for name, file in places.items()}

    def _found(self) -> dict[str, safe_open]:
        """Find the file of each weight without an index."""
        paths = [
            path
            for path in sorted(self.folder.glob("*.safetensors"))
            if not path.name.startswith(".")
        ]
        if not paths:
            raise ValueError(self._without_safetensors())
        files: dict[str, safe_open] = {}
        places: dict[str, str] = {}
        for path in [self.folder / _WHOLE] if self.folder / _WHOLE in paths else paths:
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in files:
                    raise ValueError(
                        f"{places[name]} and {path.name} in {self.folder} both hold {name}: "
                        f"delete one, or add a {_INDEX}"
                    )
                files[name], places[name] = opened, path.name
        return files

    def _without_safetensors(self) -> str:
        """Return the message for a folder without *.safetensors."""
        others = [
            path.name
            for ending in ("bin", "pt", "pth")
            for path in sorted(self.folder.glob(f"*.{ending}"))
        ]
        if not others:
            return f"{self.folder} has no weights (*.safetensors)"
        return (
            f"{self.folder} has its weights in {others[0]}, but only safetensors are read; "
            "transformers converts: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER)"
        )

    def _check(self) -> None:
        """Check that the weights are those of the config."""
        found = {
            _from_hf(name): file.get_slice(name)
            for name, file in self._files.items()
            if "rotary_emb" not in name
        }
        if self.config.num_layers > len(found):  # before a model of that size is made
            raise ValueError(
                f"{self.folder}: expected weights of {self.config.num_layers} layers "
                f"(num_hidden_layers), got {len(found)} weights"
            )
        self._expected = {
            name: tuple(p.shape) for name, p in _meta_model(self.config).named_parameters()
        }
        if self.config.tie_embeddings:
            found.pop("lm_head.weight", None)  # some writers keep the tied copy
        missing, surplus = (
            sorted(self._expected.keys() - found.keys()),
            sorted(found.keys() - self._expected.keys()),
        )
        if missing or surplus:
            raise ValueError(
                f"{self.folder}: missing weights {missing[:5]}, unexpected weights {surplus[:5]}"
            )
        for name, shape in self._expected.items():
            if tuple(found[name].get_shape()) != shape:
                have = tuple(found[name].get_shape())
                raise ValueError(f"{self.folder}: expected {name} of shape {shape}, got {have}")
            if found[name].get_dtype() not in _DTYPES:
                kinds = ", ".join(_DTYPES)
                raise ValueError(
                    f"{self.folder}: expected {name} in one of {kinds}, "
                    f"got {found[name].get_dtype()}"
                )


def load_cpm(folder: str | Path, dtype: torch.dtype = torch.float32) -> CPM:
    """Load the whole model in a Hugging Face folder, on the CPU. Raises as HFWeights."""
    weights = HFWeights(folder)
    model = _meta_model(weights.config)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return model


def save_weights(
    folder: str | Path,
    config: CPMConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    max_position_embeddings: int | None = None,
    **settings: Any,
) -> None:
    """Write config.json and *.safetensors (split at 5 GB) in `dtype`.

    `weights` have this project's names. `max_position_embeddings` is the longest sequence, unless
    `config` has a longer one or its rotary scaling another. `settings` are added to config.json,
    eos_token_id for example. A MiniCPM also gets its code, since transformers has none.

    Raises ValueError if a weight is too large for the dtype, or if Hugging Face has no model like
    `config`. Raises OSError if writing fails.
    """
    shape = config_to_hf(config, max_position_embeddings)
    Path(folder).mkdir(parents=True, exist_ok=True)
    rounded = {_to_hf(name): round_weight(name, weight, dtype) for name, weight in weights.items()}
    try:
        save_torch_state_dict(rounded, folder)
    except SafetensorError as error:
        raise OSError(f"could not write weights into {folder}: {error}") from error
    for file in Path(folder).glob("*.safetensors"):
        _let_umask_decide(file)
    if shape["model_type"] == "minicpm":
        shutil.copyfile(_CODE, Path(folder) / _CODE.name)
        settings = {"auto_map": _AUTO_MAP, **settings}
    kind = str(dtype).removeprefix("torch.")
    written = {
        **shape,
        "dtype": kind,
        "torch_dtype": kind,
        **settings,
    }  # names of transformers 5 and 4
    (Path(folder) / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def fold_scalings(
    config: CPMConfig, weights: Mapping[str, Tensor]
) -> tuple[CPMConfig, dict[str, Tensor]]:
    """Fold MiniCPM's scalings into the weights. The result computes the same without scalings.

    Embeddings are multiplied by scale_emb, the last weights of a residual branch by the branch's
    scale. The last norm's weight is divided by the logits' divisor. If the head is tied to the
    embeddings, it is also divided by scale_emb, so that tied weights stay tied. Folded weights are
    fp32. The only error is the rounding of the products, 6e-8 of each.
    """
    plain = dataclasses.replace(config, scale_emb=1.0, scale_depth=None, dim_model_base=None)
    head_scale = config.scale_emb if config.tie_embeddings else 1.0
    factors = {
        "embed_tokens": config.scale_emb,
        "norm": 1 / (config.width_scale * head_scale),
        "o_proj": config.residual_scale,  # and its bias
        "down_proj": config.residual_scale,
    }

    def folded(name: str, weight: Tensor) -> Tensor:
        factor = factors.get(name.split(".")[-2], 1.0)
        return weight if factor == 1.0 else (weight.double() * factor).float()

    return plain, {name: folded(name, weight) for name, weight in weights.items()}


def read_config(folder: Path) -> CPMConfig:
    """Read the configuration in a Hugging Face folder.

    Raises ValueError if CPM does not compute that model.
    """
    file = folder / "config.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a Hugging Face model folder")
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json, expected a Hugging Face model folder")
    hf = read_json(file)
    try:
        return config_from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read names and values from a JSON file.

    Raises ValueError if it has anything else, OSError if it cannot be read.
    """
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected names and values, got a {type(content).__name__}")
    return content


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error


def round_weight(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight to `dtype`. Raises ValueError with its name if an entry is too large."""
    rounded = weight.to(dtype).contiguous()
    if not rounded.isfinite().all():
        largest = float(weight.abs().max())
        raise ValueError(
            f"{name} has {largest:g}, too large for {str(dtype).removeprefix('torch.')}"
        )
    return rounded


def _let_umask_decide(file: Path) -> None:
    """Give a file the mode that open() would. Only the owner can read safetensors' files."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _meta_model(config: CPMConfig) -> CPM:
    with torch.device("meta"):
        return CPM(config)


def _to_hf(name: str) -> str:
    return name if name.startswith(_OUTSIDE_PREFIX) else _PREFIX + name


def _from_hf(name: str) -> str:
    return name.removeprefix(_PREFIX)
