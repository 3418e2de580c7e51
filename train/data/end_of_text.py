"""The files next to a tokenizer, and the choice of the token that ends documents by them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from models.json_files import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"  # these have its id, or a list
TOKENIZER, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"  # these name the token

USUAL = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")


def read_values(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a folder's JSON files, by name. Raises ValueError and OSError."""
    names = (CONFIG, GENERATION, TOKENIZER, SPECIAL)
    return {name: read_json(folder / name) for name in names if (folder / name).is_file()}


def token_name(token: Any) -> Any:
    """Return the name of a special token, which may be written with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def listed(value: Any) -> list[Any]:
    """Return the ids of a field that has one id, a list, or none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def choose_end(
    special: Collection[str], id_of: Callable[[str], int | None], named: dict[str, list[str]]
) -> str:
    """Return the token that ends documents: a special token of a usual name, never an ordinary one.

    special  the names of the special tokens
    id_of    finds a token by its name
    named    the result of `named_ends`, which decides between several usual names. If there is
             none, it decides between all special tokens. Chat models name the end of a turn there

    Raises ValueError if there is no such token.
    """
    files = {name: file for file, names in reversed(named.items()) for name in names}
    if usual := [name for name in USUAL if name in special]:
        return next((name for name in usual if name in files), usual[0])
    for name in (name for names in named.values() for name in names):
        # transformers makes the tokens special that a tokenizer's files name
        if name in special or (files[name] in (TOKENIZER, SPECIAL) and id_of(name) is not None):
            return name
    raise ValueError(
        f"it has no special token {' or '.join(map(repr, USUAL))} to end documents, and no file "
        "next to it names one: mark one as special there, or name a token with prepare_data.py "
        "--eos"
    )


def named_ends(folder: Path, name_of: Callable[[int], str]) -> dict[str, list[str]]:
    """Return the end tokens that a folder's files name, by file, or raise ValueError."""
    values, found = read_values(folder), dict[str, list[str]]()
    for file in (TOKENIZER, SPECIAL):
        name = token_name(values.get(file, {}).get("eos_token"))
        found[file] = [name] if isinstance(name, str) else []
    for file in (CONFIG, GENERATION):
        ids = listed(values.get(file, {}).get("eos_token_id"))
        found[file] = [name_of(i) for i in ids if type(i) is int and i >= 0]
    return {file: names for file, names in found.items() if names}


def describe_end(name: str, named: dict[str, list[str]]) -> str:
    """Name the token that ends documents, and the files that name other tokens only."""
    others = {file: names for file, names in named.items() if name not in names}
    listed = (f"{file} names {', '.join(map(repr, names))}" for file, names in others.items())
    remark = f" ({'; '.join(listed)}; --eos chooses another token)" if others else ""
    return f"documents end with {name!r}{remark}"
