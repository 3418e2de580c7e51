"""A trained model that is evaluated: a run's checkpoint, or weights of --init-from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.config import CPMConfig
from models.cpm import CPM
from models.cpm_live.layers import LiveModel
from models.tensor_files import folder_of
from train.base.wording import flag
from train.checkpoints import checkpoint
from train.checkpoints.weights import load_weights, open_weights
from train.data.folder import Sequences
from train.data.same_tokenizer import check_folder, check_weights, find_tokenizers
from train.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from train.engine import Engine
from train.loop import resume
from train.loop.inputs import check_kernel, check_length, open_data
from train.registry import load
from train.settings.config import TrainConfig
from train.settings.kinds import config_of, kind_of
from train.trained.texts import begin_token

_FROM_RUN = ("seq_len", "dtype")  # settings that are a run's, unless they are given
_OF_WEIGHTS = {"model", "accept_field", "allow_other_tokenizer", "untie"}  # for --init-from


@dataclass(frozen=True)
class Trained:
    """A trained model, before its weights are loaded: of checkpoint `path`, or of --init-from."""

    config: TrainConfig
    path: Path | None
    model: CPMConfig
    tokenizer: Tokenizer
    bos: int | None

    @property
    def name(self) -> str:
        return str(self.path or self.config.init_from)

    def load(self, engine: Engine) -> None:
        if self.path is None:
            assert self.config.init_from is not None
            load_weights(self.config.init_from, engine, self.config.expected_weights())
        else:
            engine.load(checkpoint.Checkpoint(self.path).read, optimizer_steps=0)

    def read(self, device: torch.device, dtype: torch.dtype) -> CPM:
        """Return the whole model of --init-from on one device, or raise ValueError."""
        assert self.config.init_from is not None
        with torch.device("meta"):
            model = CPM(self.model)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        expected = self.config.expected_weights()
        weights = open_weights(self.config.init_from, expected, lambda: shapes)
        read = {}
        for name in weights:
            read[name] = weights[name].to(device, dtype)
            if not read[name].isfinite().all():
                raise ValueError(f"{self.config.init_from}: {name} is not finite in {dtype}")
        model.load_state_dict(read, assign=True)
        return model.eval()

    def open_data(self, folder: str, seq_len: int) -> Sequences:
        """Open a data folder as in training. Raises ValueError if it has another tokenizer."""
        config = dataclasses.replace(self.config, seq_len=seq_len)
        data: Any = open_data(config, self.model, folder, str(self.path or config.model_name))
        place = data.folder
        if self.path is not None:
            check_folder(place, self.path / checkpoint.TOKENIZER, self.path)
        else:
            weights = Path(config.init_from or "")
            check_weights(place, load_tokenizer(place), weights, config.allow_other_tokenizer)
        apart = resume.choose_documents(config, self.path)
        if self.path is None and config.bos == "auto":  # as the folder of the weights says
            bos = self.bos if apart else None
        else:
            bos = resume.choose_begin_token(config, self.path, apart, data, self.tokenizer)
        opened: Sequences = data.keep_documents_apart(apart, bos)
        check_length(config, opened)
        return opened


def load_model(
    run: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> CPM | LiveModel:
    """Return the whole model of a run's newest checkpoint, or of a checkpoint, on one device.
    Raises CheckpointError if there is none.
    """
    return read_saved(checkpoint.Checkpoint(checkpoint.find(Path(run))), device, dtype)


def read_saved(
    saved: checkpoint.Checkpoint, device: torch.device | str, dtype: torch.dtype
) -> CPM | LiveModel:
    """Return the whole model of a checkpoint on one device."""
    config = config_of(saved.state["model"])
    with torch.device("meta"):
        model = load(kind_of(config).model)(config)
    weights = {name: w.to(device, dtype) for name, w in saved.weights().items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def check_source(run: Path | None, given: Mapping[str, Any]) -> None:
    """Raise ValueError unless a script has either --run or --init-from, and options for it."""
    if (run is None) == ("init_from" not in given):
        raise ValueError("give a trained model: either --run or --init-from")
    if run and (other := _OF_WEIGHTS & given.keys()):
        raise ValueError(f"{flag(min(other))} is for --init-from, got --run")


def open_trained(
    given: dict[str, Any], path: Path | None, tokenizer: str | None, device: torch.device
) -> Trained:
    """Return the model of checkpoint `path`, or of --init-from in the settings `given`. `tokenizer`
    replaces the model's own. Raises ValueError if it is not a dense CPM, or if it has no tokenizer.
    """
    if path is None:
        config = TrainConfig(**given)
        model: Any = config.model_config()
    else:
        state = checkpoint.Checkpoint(path).state
        saved = {name: state["config"][name] for name in _FROM_RUN}
        config, model = TrainConfig(**{**saved, **given}), config_of(state["model"])
    if not isinstance(model, CPMConfig):
        raise ValueError(f"expected a dense CPM, got a {kind_of(model).name}, which reads no texts")
    check_kernel(config, model, device)
    found = open_tokenizer(tokenizer) if tokenizer else _find_tokenizer(path, config)
    if found.vocab_size > model.vocab_size:
        named = path or config.model_name
        advice = "" if path or config.given_model else ": give --model, as for pretrain.py"
        raise ValueError(
            f"expected a tokenizer of at most {model.vocab_size} tokens, which {named} has, got "
            f"one of {found.vocab_size}{advice}"
        )
    return Trained(config, path, model, found, begin_token(config, path, found))


def checkpoint_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder: its own, or its run's."""
    own = path / checkpoint.TOKENIZER
    return load_tokenizer(own if own.is_dir() else path.parent / checkpoint.TOKENIZER)


def _find_tokenizer(path: Path | None, config: TrainConfig) -> Tokenizer:
    """Return the tokenizer of a checkpoint, or the one next to the weights."""
    if path is not None:
        return checkpoint_tokenizer(path)
    folder = folder_of(config.init_from or "")
    for _, found in find_tokenizers(folder, None):
        if isinstance(found, Tokenizer):
            return found
        raise ValueError(found)
    raise ValueError(
        f"{folder} has no tokenizer.json or tokenizer.model: put one there, or give evaluate.py "
        "--tokenizer"
    )
