"""The command line of pretrain.py and its config file, made from the fields of TrainConfig."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from train.base.command_line import ArgumentParser, read_length
from train.base.wording import flag, naming
from train.data.shares import parse_sources
from train.settings.config import TrainConfig
from train.settings.settings import COMPONENTS, FACTS

_SOURCES = str | dict  # a path, or texts by name
_KINDS = {
    "Mapping[str, Any]": dict,
    "str | Mapping[str, str]": _SOURCES,
    **{kind.__name__: kind for kind in (bool, int, float, str)},
}


def _kind_of(f: dataclasses.Field) -> Any:
    return _KINDS[str(f.type).removesuffix(" | None")]


def parse_options(argv: Sequence[str] | None = None) -> tuple[ArgumentParser, dict[str, Any]]:
    """Return the options given on a command line, and their parser, which reports errors."""
    parser = _parser()
    return parser, vars(parser.parse_args(argv))


def make_config(given: dict[str, Any]) -> TrainConfig:
    """Return the configuration of the options `given`, over --config FILE and the defaults."""
    file = given.pop("config", None)
    values = read_values(read_file(Path(file), "--config"), file) if file else {}
    return TrainConfig(**{**values, **given})


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "pretrain.py",
        "Pretrain a CPM language model on long sequences, each cut over --sp-size ranks.",
        epilog="Example: python train/pretrain.py --processes 2 --sp-size 2 --resume auto "
        "--data data/stdlib/train",
        formatter_class=argparse.HelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML or JSON file with any of the options below, as in seq_len = 512",
    )
    parser.add_argument(
        "--stages",
        metavar="FILE",
        help="TOML or JSON file with stages that are trained one after the other: options of all "
        "stages, and a table [[stage]] with a name and the options of each. The same command "
        "resumes",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory, the time and the longest sequence of this run, and end without "
        "training; needs no GPU and no data",
    )
    add_options(parser, {f.name for f in dataclasses.fields(TrainConfig)})
    return parser


def add_options(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add the options of TrainConfig called `names` to a parser, without defaults."""
    for title, component in COMPONENTS.items():
        if wanted := [f for f in dataclasses.fields(component) if f.name in names]:
            group = parser.add_argument_group(title)
            for f in wanted:
                _add_option(group, f)


def _add_option(group: Any, f: dataclasses.Field) -> None:
    kind, facts = _kind_of(f), FACTS[f.name]
    shown = "" if f.default is None else f" (default: {f.default})"
    extra: dict[str, Any] = {"help": facts.help.replace("%", "%%") + shown}
    if kind is bool:
        extra["action"] = argparse.BooleanOptionalAction
    elif kind is _SOURCES:
        extra |= {"action": SourcesAction, "nargs": "+", "metavar": "PATH"}
    elif facts.choices:
        extra |= {"type": kind, "choices": facts.choices}
    elif facts.is_length:
        extra |= {"type": read_length, "metavar": "TOKENS"}
    elif kind is dict:
        extra |= {"type": _json_object, "metavar": "JSON"}
    else:
        extra |= {"type": kind, "metavar": kind.__name__.upper()}
    group.add_argument(flag(f.name), default=argparse.SUPPRESS, **extra)


class SourcesAction(argparse.Action):
    """Stores one path, or the texts after NAME= by name."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        try:
            setattr(namespace, self.dest, parse_sources(values))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected names and values in braces, got {text!r}")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. TOML refuses duplicate names itself."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected different names, got {duplicate!r} twice")
    return values


def read_file(path: Path, option: str) -> dict[str, Any]:
    """Return the names and values of a TOML or JSON file that `option` names."""
    read_json = partial(json.loads, object_pairs_hook=_refuse_duplicates)
    formats: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": read_json}
    if path.suffix not in formats:
        raise ValueError(f"{option} must end in .toml or .json, got {path}")
    with naming(path, RecursionError):
        values = formats[path.suffix](path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"expected names and values in {path}, got {type(values).__name__}")
    return values


def read_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return options with their fields' types. Raises ValueError, which names `where` they are."""
    fields = {f.name: f for f in dataclasses.fields(TrainConfig)}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(
                f"{where}: unknown option {name!r}; expected one of {', '.join(fields)}"
            )
        kind = _kind_of(fields[name])
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            values[name] = float(value)
        elif FACTS[name].is_length and isinstance(value, str):
            with naming(f"{where}: {name}", argparse.ArgumentTypeError):
                values[name] = read_length(value)
        elif value is None and fields[name].default is None:
            continue  # JSON's way to leave it unset
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = "a path or a table" if kind is _SOURCES else kind.__name__
            raise ValueError(f"{where}: {name} must be {wanted}, got {value!r}")
    return values
