"""The begin token and the end tokens of a trained model: of its run, or as its folder's files say.

A run has saved its begin token. In the folder of --init-from, tokenizer.json's post_processor names
it. Without one, `add_bos_token` of tokenizer_config.json decides, or else the default of its
tokenizer_class. Texts end with the tokens that `eos_token_id` lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from models.json_files import read_json
from models.tensor_files import folder_of
from train.base import ranks
from train.base.wording import naming
from train.checkpoints import checkpoint
from train.checkpoints.beside import ADDED
from train.data.end_of_text import GENERATION, SPECIAL, TOKENIZER, listed, read_values, token_name
from train.data.tokenizer import SentencePieceTokenizer, Tokenizer, saved_spec
from train.loop import resume
from train.settings.config import TrainConfig

_BEGINNING = ("Llama", "CodeLlama", "Gemma", "Cohere")  # their tokenizer classes put a begin token


def begin_token(config: TrainConfig, path: Path | None, tokenizer: Tokenizer) -> int | None:
    """Return the token in front of a text that no data folder holds: as --bos says, else as in the
    run of checkpoint `path`, or as the folder of --init-from or of the tokenizer says.

    Raises ValueError for a token that the tokenizer lacks, and for a folder with several.
    """
    if config.bos == "none" or config.documents == "ignore":
        return None
    if config.bos != "auto":
        return resume.named_token(config.bos, tokenizer, str(path or config.init_from))
    if path is not None:
        return resume.saved_begin_token(checkpoint.Checkpoint(path).state)
    own = tokenizer.file
    folder = folder_of(config.init_from or "") if own is None else own.parent
    return folder_begin_token(folder, tokenizer)


def folder_begin_token(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Return the token that a folder's files put in front of a text, or raise ValueError."""
    spec, values = saved_spec(folder) or {}, read_values(folder)
    if tokenizer.file is None and spec.get("kind") is not type(tokenizer):
        return tokenizer.bos_id  # the folder is not this tokenizer's
    if "begin" in spec:
        return None if spec["begin"] is None else tokenizer.id_of(spec["begin"])
    if spec and (folder / "model.json").is_file():
        return tokenizer.bos_id  # an older export for bmtrain, which has not saved it
    named, adds = _named_begin_token(values, tokenizer), None
    if isinstance(asked := values.get(TOKENIZER, {}).get("add_bos_token"), bool):
        adds = asked
    file = folder / "tokenizer.json"
    if tokenizer.file is not None and tokenizer.file.suffix == ".json":
        file = tokenizer.file
    if file.is_file() and (rules := read_json(file).get("post_processor")):
        found = _put_in_front(file, rules, tokenizer)
        if adds is not None and adds != (found is not None):
            puts = "no token" if found is None else repr(tokenizer.name_of(found))
            ranks.warn(
                f"{file} puts {puts} in front of a text, but {TOKENIZER} has add_bos_token "
                f"{str(adds).lower()}: the first is used, unless --bos says otherwise"
            )
        return found
    if adds is None:
        adds = _adds_by_class(values, tokenizer)
    return named if adds else None


def _adds_by_class(values: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the class of a tokenizer puts a begin token in front of a text by default."""
    named = (values.get(name, {}).get("tokenizer_class") for name in (TOKENIZER, "config.json"))
    kind = next((name for name in named if isinstance(name, str)), None)
    if kind is None:  # transformers reads a lone SentencePiece model as Llama's
        return isinstance(tokenizer, SentencePieceTokenizer)
    return kind.removesuffix("Fast").removesuffix("Tokenizer") in _BEGINNING


def _named_begin_token(values: Mapping[str, Any], tokenizer: Tokenizer) -> int | None:
    """Return the begin token that files name, or else the tokenizer's own, if it has one."""
    for name in (TOKENIZER, SPECIAL):
        if "bos_token" in values.get(name, {}):
            token = token_name(values[name]["bos_token"])
            return None if token is None else tokenizer.id_of(str(token))
    return None if tokenizer.bos_id == tokenizer.eos_id else tokenizer.bos_id


def _put_in_front(file: Path, rules: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """Return the token that a post_processor puts in front of a text, found by one of one word."""
    word = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
    probe = json.dumps({"version": "1.0", "model": word, "post_processor": rules})
    with naming(f"{file}: post_processor", Exception):  # tokenizers raises plain Exceptions
        encoding = Backend.from_str(probe).encode("x")
    if 0 not in encoding.special_tokens_mask:
        raise ValueError(f"{file}: expected a post_processor that keeps the text, got {rules}")
    tokens = encoding.ids[: encoding.special_tokens_mask.index(0)]
    if len(tokens) > 1:
        names = ", ".join(repr(tokenizer.name_of(token)) for token in tokens)
        raise ValueError(
            f"{file} puts {names} in front of a text, expected at most one token: give --bos TOKEN "
            "or none"
        )
    return tokens[0] if tokens else None


def run_stops(state: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text of a run: the end of its documents, and those that the
    folder of its first weights lists, as its export does.
    """
    record = state.get("beside") or {}
    known = not record.get("foreign", True)
    stops = _stops(record["values"]) if known else []
    return frozenset({tokenizer.eos_id, *(i for i in stops if 0 <= i < tokenizer.vocab_size)})


def folder_stops(source: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text as the folder of the weights lists, or else its tokenizer's
    end-of-text token. Raises ValueError for broken files, and OSError.
    """
    folder = folder_of(source)
    stops = frozenset(i for i in _stops(read_values(folder)) if type(i) is int and i >= 0)
    if lacking := sorted(i for i in stops if i >= tokenizer.vocab_size):
        ranks.warn(
            f"{folder}: eos_token_id lists {', '.join(map(str, lacking))}, but the tokenizer has "
            f"only {tokenizer.vocab_size} tokens: no text ends there"
        )
    return stops.difference(lacking) or frozenset({tokenizer.eos_id})


def lacking_tokens(source: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the added tokens that the folder of the weights names, but its tokenizer's file lacks.
    Raises ValueError for broken files, and OSError.
    """
    folder = folder_of(source)
    added = read_values(folder).get(TOKENIZER, {}).get(ADDED) or {}
    if not isinstance(added, dict):
        expected = f"expected {ADDED} to have tokens by id"
        raise ValueError(f"{folder / TOKENIZER}: {expected}, got {added!r}")
    names = [str(token_name(token)) for token in added.values()]
    return tuple(name for name in names if tokenizer.id_of(name) is None)


def _stops(values: Mapping[str, Any]) -> list[Any]:
    places = [values.get(name, {}) for name in ("config.json", GENERATION)]
    return [token for place in places for token in listed(place.get("eos_token_id"))]
