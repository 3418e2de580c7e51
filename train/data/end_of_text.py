"""The choice of the token that ends documents, by usual names and by files next to a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from models.json_files import read_json

USUAL = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
_OF_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json")  # these name the token
_OF_MODELS = ("config.json", "generation_config.json")  # these have its id, or a list


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
        if name in special or (files[name] in _OF_TOKENIZERS and id_of(name) is not None):
            return name
    raise ValueError(
        f"it has no special token {' or '.join(map(repr, USUAL))} to end documents, and no file "
        "next to it names one: mark one as special there, or name a token with prepare_data.py "
        "--eos"
    )


def named_ends(folder: Path, name_of: Callable[[int], str]) -> dict[str, list[str]]:
    """Return the end tokens that a folder's files name, by file, or raise ValueError."""
    found = {}
    for file in (*_OF_TOKENIZERS, *_OF_MODELS):
        values = read_json(folder / file) if (folder / file).is_file() else {}
        if file in _OF_TOKENIZERS:
            token = values.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            names = [token] if isinstance(token, str) else []
        else:
            ids = values.get("eos_token_id")
            listed = ids if isinstance(ids, list) else [ids]
            names = [name_of(token) for token in listed if type(token) is int and token >= 0]
        if names:
            found[file] = names
    return found


def describe_end(name: str, named: dict[str, list[str]]) -> str:
    """Name the token that ends documents, and the files that name other tokens only."""
    others = {file: names for file, names in named.items() if name not in names}
    listed = (f"{file} names {', '.join(map(repr, names))}" for file, names in others.items())
    remark = f" ({'; '.join(listed)}; --eos chooses another token)" if others else ""
    return f"documents end with {name!r}{remark}"
