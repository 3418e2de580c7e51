"""Weights in folders with a config.json: Hugging Face's, and ModelCenter's of a Llama.

    model = load_cpm("MiniCPM4-8B")  # also folders of the other families in hf_families.py
    save_weights("as-llama", *fold_scalings(model.config, model.state_dict()))

Parameters have Hugging Face's names without the leading "model.", so a conversion only renames.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from .config import CPMConfig
from .cpm import CPM
from .hf_config import HF_FIELDS, config_from_hf, config_to_hf
from .hf_families import EXPORTED_CODE, FAMILIES
from .json_files import read_json
from .model_center import MODEL_CENTER_FIELDS, config_from_model_center
from .tensor_files import dtype_name, open_folder
from .weights import HEAD, Expected, Weights

CONFIG = "config.json"
_GENERATION = "generation_config.json"
# the code of a MiniCPM's folder, and transformers' class -> its place in it
_CODE = Path(__file__).with_name(f"{EXPORTED_CODE}.py")
_AUTO_MAP = {
    "AutoConfig": f"{_CODE.stem}.MiniCPMConfig",
    "AutoModel": f"{_CODE.stem}.MiniCPMModel",
    "AutoModelForCausalLM": f"{_CODE.stem}.MiniCPMForCausalLM",
}


class HFWeights(Weights):
    """The weights in a folder under this project's names. Each is read when it is requested.

    With `untie`, a model with tied embeddings gets a head of its own: the one in the files, or a
    copy of the embeddings. `accept` names unknown fields of config.json that change nothing.

    Raises ValueError if CPM does not compute the model of the folder's config, if files are
    missing, damaged or have the same weight twice, or if the weights are not exactly those of the
    config, in a floating-point dtype of 16 bits or more. Raises OSError if it may not be read.
    """

    def __init__(self, folder: str | Path, untie: bool = False, accept: Collection[str] = ()):
        self.folder = Path(folder)
        self.config = read_config(self.folder, accept)
        if untie:
            self.config = self.config.untied()
        expected = expect(self.folder, self.config, "cpm", read_fields(self.folder), untie)
        super().__init__(self.folder, open_folder(self.folder), expected, self._shapes)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in _meta_model(self.config).named_parameters()}


def load_cpm(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    untie: bool = False,
    accept: Collection[str] = (),
) -> CPM:
    """Load the whole model in a folder, on the CPU. Arguments and errors are HFWeights'."""
    weights = HFWeights(folder, untie, accept)
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
    theirs = {name: name if name == HEAD else f"model.{name}" for name in weights}
    rounded = {theirs[name]: round_weight(name, x, dtype) for name, x in weights.items()}
    try:
        save_torch_state_dict(rounded, folder)
    except SafetensorError as error:
        raise OSError(f"could not write weights into {folder}: {error}") from error
    for file in Path(folder).glob("*.safetensors"):
        _let_umask_decide(file)
    if FAMILIES[shape["model_type"]].exported_code:
        shutil.copyfile(_CODE, Path(folder) / _CODE.name)
        settings = {"auto_map": _AUTO_MAP, **settings}
    kind = dict.fromkeys(("dtype", "torch_dtype"), dtype_name(dtype))  # transformers 5's, and 4's
    written = json.dumps({**shape, **kind, **settings}, indent=2)
    (Path(folder) / CONFIG).write_text(written + "\n")


def fold_scalings(
    config: CPMConfig, weights: Mapping[str, Tensor]
) -> tuple[CPMConfig, dict[str, Tensor]]:
    """Fold MiniCPM's scalings into the weights. The result computes the same without scalings.

    Embeddings are multiplied by scale_emb, the last weights of a residual branch by the branch's
    scale. The last norm's weight is divided by the logits' divisor. If the head is tied to the
    embeddings, it is also divided by scale_emb, so that tied weights stay tied. Folded weights are
    fp32. The only error is the rounding of the products, 6e-8 of each.
    """
    plain = dataclasses.replace(
        config, scale_emb=1.0, scale_depth=None, dim_model_base=None, family=None
    )
    head_scale = config.scale_emb if config.tie_embeddings else 1.0
    factors = dict.fromkeys(("o_proj", "down_proj"), config.residual_scale)  # and their biases
    factors |= {"embed_tokens": config.scale_emb, "norm": 1 / (config.width_scale * head_scale)}

    def folded(name: str, weight: Tensor) -> Tensor:
        factor = factors.get(name.split(".")[-2], 1.0)
        return weight if factor == 1.0 else (weight.double() * factor).float()

    return plain, {name: folded(name, weight) for name, weight in weights.items()}


def read_config(folder: Path, accept: Collection[str] = ()) -> CPMConfig:
    """Read the configuration in a folder of a dense CPM. Raises ValueError for other models, and
    for unknown fields that `accept` does not name.
    """
    hf = read_folder(folder)
    try:
        config = config_from_model_center(hf) if "dim_model" in hf else config_from_hf(hf, accept)
        _check_tokens(folder, hf, config)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    return config


def read_folder(folder: Path) -> dict[str, Any]:
    """Read config.json in a folder. Raises ValueError if there is none, or for anything else."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a Hugging Face model folder")
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    if (folder / CONFIG).is_file():
        return read_json(folder / CONFIG)
    pair = sorted(folder.glob("*.pt")), sorted(folder.glob("model.json"))
    advice = f": give the file {pair[0][0]}, and --model {pair[1][0]}" if all(pair) else ""
    if folder.name.startswith("step_") or any(folder.glob("step_*")):
        advice = ": train a run on with --resume and --new-stage, or export it by train/export.py"
    raise ValueError(f"{folder} has no config.json, expected a Hugging Face model folder{advice}")


def read_fields(folder: Path) -> dict[str, str]:
    """Return the names in a folder's config.json of CPMConfig's fields."""
    return MODEL_CENTER_FIELDS if "dim_model" in read_folder(folder) else HF_FIELDS


def expect(
    folder: Path, config: Any, kind: str, fields: Mapping[str, str], untie: bool
) -> Expected:
    """Return how to check the weights in a folder, by its config.json. The others are Expected's
    fields.
    """
    said = read_folder(folder).get(fields.get("tie_embeddings", ""))
    where = str(folder / CONFIG)
    return Expected(config, kind, where, fields, untie, ties_by_default=said is None)


def _check_tokens(folder: Path, hf: dict[str, Any], config: CPMConfig) -> None:
    """Raise ValueError for tokens beyond the vocabulary, or if no end token is in both files."""
    other = folder / _GENERATION
    generation = read_json(other) if other.is_file() else {}
    for values, place in ((hf, ""), (generation, f" in {other}")):
        for name in ("bos_token_id", "eos_token_id"):
            if (most := max(_token_ids(values, name), default=0)) >= config.vocab_size:
                raise ValueError(f"{name} is {most}{place}, beyond vocab_size {config.vocab_size}")
    # published folders have another begin token; an export reports it (train/checkpoints/beside.py)
    ids, generated = (_token_ids(values, "eos_token_id") for values in (hf, generation))
    if ids and generated and not ids & generated:
        raise ValueError(
            f"eos_token_id is {hf['eos_token_id']}, but {generation['eos_token_id']} in {other}: "
            "correct one of the files"
        )


def _token_ids(values: dict[str, Any], name: str) -> set[int]:
    """Return the ids in a field with a token, several or none."""
    value = values.get(name)
    ids = value if isinstance(value, list) else [value]
    return {token for token in ids if isinstance(token, int)}


def round_weight(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight to `dtype`. Raises ValueError with its name if an entry is too large."""
    rounded = weight.to(dtype).contiguous()
    if not rounded.isfinite().all():
        largest = float(weight.abs().max())
        raise ValueError(f"{name} has {largest:g}, too large for {dtype_name(dtype)}")
    return rounded


def _let_umask_decide(file: Path) -> None:
    """Give a file the mode that open() would. Only the owner can read safetensors' files."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def _meta_model(config: CPMConfig) -> CPM:
    with torch.device("meta"):
        return CPM(config)
