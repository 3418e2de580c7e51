"""The inputs of a run: model, data and tokenizer, all checked before anything is built."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from bmt_burst import kernels
from bmt_burst.lightning import kernels as lightning_kernels
from bmt_burst.spec import Spec
from models.config import CPMConfig
from models.mixers import find_lightning_flash
from train.base import ranks
from train.base.wording import naming
from train.data.mixture import Mixture, parts
from train.data.same_tokenizer import check_folder
from train.data.shares import first_folder, parse_shares, validation_folders
from train.data.source import Source, Stored
from train.data.stream import Stream
from train.data.stream_files import StreamFiles, is_stream
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.loop import resume
from train.registry import KINDS, load
from train.settings.config import TrainConfig, remark_length
from train.settings.kinds import ModelConfig, kind_of
from train.settings.settings import DTYPES


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run. `model` is a configuration, the tokenizer is the training data's.

    training        sequences of --data
    validation      sequences of each source of --val-data by name; the name of a path is empty
    """

    model: ModelConfig
    training: Source
    validation: dict[str, Stored]
    tokenizer: Tokenizer


def open_inputs(config: TrainConfig, device: torch.device) -> Inputs:
    """Open what `config` names. Raises ValueError if model, kernel and data do not fit together, if
    the model is not that of the checkpoint to resume from, or if --output has others.
    """
    resume.check_output(config)
    model = config.model_config()
    if config.grow_vocabulary:
        size = load_tokenizer(Path(first_folder(config.data))).vocab_size
        size = max(model.vocab_size, size)
        model = dataclasses.replace(model, vocab_size=size)
    if resumed := config.resumed():
        new_stage = resume.begins_stage(config)
        resume.check_model(*resumed, model, new_stage, config.given_model)
    warn_of_length(config, model)
    if config.init_from and resumed is None and config.lr == TrainConfig.lr:
        ranks.warn(
            f"--lr {config.lr:g} is the default, which is for tiny models: weights of --init-from "
            "mostly need a smaller one"
        )
    check_kernel(config, model, device)
    training = _open_training(config, model)
    validation = _open_validation(config, model, training)
    return Inputs(model, training, validation, load_tokenizer(training.folder))


def check_same_data(inputs: Inputs) -> None:
    """Raise RankError on every rank if hosts opened other data. Every rank must call this."""
    opened = {f"--data {name}": data for name, data in parts(inputs.training).items()}
    opened |= {f"--val-data {name}": data for name, data in inputs.validation.items()}
    facts = {
        f"{fact} of {name.strip()}": value
        for name, data in opened.items()
        for fact, value in data.identity.items()
    }
    ranks.check_same(facts, "give all hosts the same data")


def keep_documents_apart(inputs: Inputs, config: TrainConfig, resumed: Path | None) -> Inputs:
    """Return the inputs with documents apart or not, and their begin token, as in `resumed`.
    Raises ValueError if that is not possible, or if most positions would be padding.
    """
    apart = resume.choose_documents(config, resumed)
    bos = resume.choose_begin_token(config, resumed, apart, inputs.training, inputs.tokenizer)
    training = inputs.training.keep_documents_apart(apart, bos)
    for part in parts(training).values():
        check_length(config, part)
    validation = {
        name: data.keep_documents_apart(apart, bos) for name, data in inputs.validation.items()
    }
    return dataclasses.replace(inputs, training=training, validation=validation)


def check_length(config: TrainConfig, data: Source) -> None:
    """Raise ValueError if most of a sequence would be padding. A stream has no number of tokens."""
    tokens = data.identity.get("tokens", config.seq_len)
    if tokens < config.seq_len / 2:
        raise ValueError(
            f"{data.folder} has {tokens:,} tokens, less than half of a sequence of "
            f"{config.seq_len:,}: give more text or shorter sequences"
        )


def _open_training(config: TrainConfig, model: ModelConfig) -> Source:
    """Open --data. Raises ValueError if sources have the same text, or other tokenizers."""
    if isinstance(config.data, str):
        return open_source(config, model, config.data)
    shares = parse_shares(config.data)
    sources = {name: open_source(config, model, at) for name, (at, _) in shares.items()}
    [(first, expected), *others] = sources.items()
    for name, data in others:
        names = f"source {name} ({data.folder})", f"source {first} ({expected.folder})"
        check_folder(expected.folder, data.folder, *names)
    for (one, a), (other, b) in itertools.combinations(sources.items(), 2):
        if a.identity == b.identity:
            raise ValueError(
                f"--data: sources {one} ({a.folder}) and {other} ({b.folder}) are the same text: "
                "give it once, with the sum of both weights"
            )
    return Mixture(sources, {name: weight for name, (_, weight) in shares.items()})


def open_source(config: TrainConfig, model: ModelConfig, folder: str) -> Source:
    """Open a folder of training data, which may be a stream. Raises ValueError as `open_data`."""
    if not is_stream(folder):
        return open_data(config, model, folder)
    if (kind := kind_of(model)) is not KINDS[0]:
        raise ValueError(
            f"{folder} is a stream of documents, but {config.model_name} is a {kind.name}"
        )
    announces = ranks.rank() % config.sp_size == 0
    stream = Stream(Path(folder), StreamFiles.open(Path(folder)), config, announces)
    _check_vocabulary(config, None, model, stream)
    return stream


def open_data(
    config: TrainConfig, model: ModelConfig, folder: str, name: str | None = None
) -> Stored:
    """Open a data folder. Raises ValueError if it has more tokens than the model, called `name`."""
    data: Stored = load(kind_of(model).data).open(folder, model, config.seq_len, config.seed)
    _check_vocabulary(config, name, model, data)
    return data


def _check_vocabulary(
    config: TrainConfig, name: str | None, model: ModelConfig, data: Source
) -> None:
    if (found := data.vocab_size) <= model.vocab_size:
        return
    if name or config.given_model:
        advice = (
            "give data or a model with another vocabulary; pretrain.py --init-from with "
            "--grow-vocabulary adds rows for new tokens"
        )
    elif config.resumed():
        advice = "give data of its tokenizer"
    else:
        advice = "give --model, or a folder as --init-from"
    raise ValueError(
        f"{data.folder} has a vocabulary of {found} tokens, but {name or config.model_name} has "
        f"only {model.vocab_size}: {advice}"
    )


def _open_validation(
    config: TrainConfig, model: ModelConfig, training: Source
) -> dict[str, Stored]:
    """Open --val-data. Raises ValueError if its tokenizer is not the training data's."""
    opened = {}
    for name, folder in validation_folders(config.val_data).items():
        data = opened[name] = open_data(config, model, folder)
        if any(data.folder.samefile(part.folder) for part in parts(training).values()):
            same = f"--val-data and --data are the same folder, {folder}"
            ranks.warn(f"{same}: the validation loss will be measured on training text")
        check_folder(training.folder, data.folder, data.folder)
    return opened


def warn_of_length(config: TrainConfig, model: ModelConfig, option: str | None = None) -> None:
    """Warn if rows are longer than the model was made for. `option` gave their length."""
    if isinstance(model, CPMConfig) and (remark := remark_length(config, model, option)):
        ranks.warn(remark)


def check_kernel(config: TrainConfig, model: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if --flash names a kernel that cannot compute this model's heads here."""
    q, k = (
        torch.empty(1, 1, heads, model.head_dim, dtype=DTYPES[config.dtype], device=device)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    with naming(f"--flash {config.flash}"):
        kernels.pick(config.flash, q, k, Spec(model.head_dim**-0.5, config.deterministic))
        if isinstance(model, CPMConfig) and model.lightning_layers:
            lightning_kernels.pick(find_lightning_flash(config.flash), q)
