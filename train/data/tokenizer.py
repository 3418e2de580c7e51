"""Tokenizers: bytes; a `tokenizers` (.json) or SentencePiece (.model) file; or a vocabulary.

`save` writes a tokenizer and its identity into a folder, and `load_tokenizer` reads it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.json_files import refuse_pointer
from train.base.folders import inside
from train.data.end_of_text import USUAL, choose_end, named_ends
from train.data.tokenizer_base import SPEC, Tokenizer
from train.registry import KINDS, load

BYTES_END_OF_TEXT = "<|endoftext|>"  # the name of the token that ends a document of bytes
_BEGIN_OF_TEXT = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[CLS]")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    vocab_size = 257
    eos_id = bos_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def special_names(self) -> Collection[str]:
        return (BYTES_END_OF_TEXT,)

    def id_of(self, token: str) -> int | None:
        return self.eos_id if token == BYTES_END_OF_TEXT else None

    def name_of(self, token: int) -> str:
        if token > self.eos_id:
            return f"token {token}"
        return BYTES_END_OF_TEXT if token == self.eos_id else f"<0x{token:02X}>"

    def _rules(self) -> str:
        return "UTF-8"


class JsonTokenizer(Tokenizer):
    """A `tokenizers` file (tokenizer.json), with the end-of-text token `eos`, or a usual one.

    If `older`, it belongs to a folder that does not name this token. Then it is the first usual
    name of any token, even of an ordinary one. Raises ValueError if there is no such token. A text
    never becomes special tokens, not even where it spells them. It may become other added tokens,
    which decode to the same text.
    """

    file: Path
    eos: str

    def __init__(self, file: Path, eos: str | None = None, older: bool = False):
        from tokenizers import Tokenizer as Backend

        self.file = file
        self._backend = Backend.from_file(str(file))
        self._backend.no_truncation()  # files may set a length for truncation and padding
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # as text
        self.vocab_size = max(self._backend.get_vocab().values()) + 1
        added = self._backend.get_added_tokens_decoder().items()
        self._special = {token.content: i for i, token in added if token.special}
        if older and not eos:
            eos = next((name for name in USUAL if self.id_of(name) is not None), USUAL[0])
        ends = named_ends(file.parent, self.name_of) if not eos else {}
        self.eos = eos or choose_end(self._special, self.id_of, ends)
        if (found := self.id_of(self.eos)) is None:
            raise ValueError(
                f"it has no end-of-text token {self.eos!r}; name another one with --eos"
            )
        self.eos_id = found
        special = set(self._special.values())
        self.bos_id = self._begin_id(special)
        self._not_text = np.array(sorted((special - {self._unknown_id()}) | {self.eos_id}))

    def encode(self, text: str) -> np.ndarray:
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        ids = np.array(encoding.ids, dtype=np.int64)
        return self._encode_apart(text) if np.isin(ids, self._not_text).any() else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids if i != self.eos_id])

    def special_names(self) -> Collection[str]:
        return self._special.keys()

    def encode_special(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = False
        ids = self._backend.encode(text, add_special_tokens=False).ids
        self._backend.encode_special_tokens = True  # as text
        return ids

    def decode_special(self, ids: Sequence[int]) -> str:
        return self._backend.decode([*ids], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def name_of(self, token: int) -> str:
        found = self._backend.id_to_token(token)
        return f"token {token}" if found is None else found

    def _begin_id(self, special: set[int]) -> int:
        """Return a special token of a usual name, else the one that begins texts, else eos."""
        for name in _BEGIN_OF_TEXT:
            if (found := self._backend.token_to_id(name)) in special:
                return found
        rules = json.loads(self.file.read_text()).get("post_processor") or {}
        for rule in rules.get("processors", [rules]):
            if rule.get("type") == "TemplateProcessing" and "SpecialToken" in next(
                iter(rule["single"]), {}
            ):
                return rule["special_tokens"][rule["single"][0]["SpecialToken"]["id"]]["ids"][0]
        return self.eos_id

    def _rules(self) -> Any:
        """Omit settings that `encode` does not use, and unify spellings of different versions."""
        rules = json.loads(self._backend.to_str())
        for name in ("version", "truncation", "padding", "post_processor"):
            rules.pop(name)
        if merges := rules["model"].get("merges"):
            rules["model"]["merges"] = [
                merge.split(" ") if isinstance(merge, str) else merge for merge in merges
            ]
        return _without_defaults(rules)

    def _encode_apart(self, text: str) -> np.ndarray:
        """Encode a text that spells a special token, by cutting the spelling in two, or raise
        ValueError if it is a single character. Some models have these among their pieces.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        found = np.flatnonzero(np.isin(encoding.ids, self._not_text))
        for i in found:
            start, end = encoding.offsets[i]
            if end - start < 2:
                raise ValueError(
                    f"{self.file} encodes {text[start:end]!r} only as special token "
                    f"{encoding.tokens[i]}"
                )
        cuts = sorted({encoding.offsets[i][0] + 1 for i in found})
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        return np.concatenate([self.encode(part) for part in parts])

    def _unknown_id(self) -> int | None:
        """Return the id of unknown text, which may be marked as special."""
        model = json.loads(self.file.read_text())["model"]
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self._backend.token_to_id(token)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with the end-of-text token `eos`, or its end-of-sentence token.

    Raises ValueError if there is none, or if it is no control symbol, since a text could become
    it. A text never becomes control symbols, but it may become user-defined ones.
    """

    file: Path

    def __init__(self, file: Path, eos: str | None = None):
        from sentencepiece import SentencePieceProcessor

        self.file, self.eos = file, eos
        self._backend = SentencePieceProcessor(model_file=str(file))
        self.vocab_size = self._backend.vocab_size()
        self.eos_id = self._backend.eos_id() if eos is None else self._backend.piece_to_id(eos)
        if self.eos_id < 0:
            raise ValueError(
                "it was trained without an end-of-sentence token; name a control symbol with --eos"
            )
        if eos is not None and not self._backend.is_control(self.eos_id):
            raise ValueError(
                f"the end-of-text token must be one of its control symbols, got {eos!r}"
            )
        begin = self._backend.bos_id()  # below 0 if there is none
        self.bos_id = self.eos_id if begin < 0 else begin

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids if i != self.eos_id])

    def special_names(self) -> Collection[str]:
        pieces = filter(self._backend.is_control, range(self.vocab_size))
        return [self._backend.id_to_piece(piece) for piece in pieces]

    def id_of(self, token: str) -> int | None:
        found = self._backend.piece_to_id(token)  # the unknown piece's id if there is no such token
        return found if self._backend.id_to_piece(found) == token else None

    def name_of(self, token: int) -> str:
        known = token < self.vocab_size
        return self._backend.id_to_piece(token) if known else f"token {token}"

    def _rules(self) -> str:
        return hashlib.sha256(self._backend.serialized_model_proto()).hexdigest()


_Open = Callable[..., Tokenizer]  # the class of a tokenizer, made from a file
_BY_SUFFIX: dict[str, _Open] = {".json": JsonTokenizer, ".model": SentencePieceTokenizer}
# tokenizers that are named as PREFIX:FILE, as parts of their kinds of models
_BY_PREFIX = {prefix: part for kind in KINDS for prefix, part in kind.tokenizers.items()}
_BY_CLASS = {part.partition(":")[2]: part for part in _BY_PREFIX.values()}
_OWN = {kind.__name__: kind for kind in (ByteTokenizer, JsonTokenizer, SentencePieceTokenizer)}


def open_tokenizer(name: str, eos: str | None = None) -> Tokenizer:
    """Return the tokenizer called `name`: "bytes", a .json or .model file, or PREFIX:FILE.

    `eos` names the end-of-text token of a file. Raises ValueError if the tokenizer cannot be read
    or has a fixed one.
    """
    prefix, _, vocabulary = name.partition(":")
    listed = vocabulary and prefix in _BY_PREFIX
    if eos is not None and (listed or name == "bytes"):
        raise ValueError(
            f"--eos is for a .json or .model file, got {eos!r} for {name}, which has a "
            "fixed end-of-text token"
        )
    if name == "bytes":
        return ByteTokenizer()
    if listed:
        return _read(load(_BY_PREFIX[prefix]), Path(vocabulary))
    path = Path(name)
    if path.suffix not in _BY_SUFFIX:
        raise ValueError(
            f"tokenizer must be 'bytes', a .json or .model file, or {', '.join(_BY_PREFIX)} with "
            f":FILE, a vocabulary; got {name!r}"
        )
    return _read(_BY_SUFFIX[path.suffix], path, eos)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that was saved into `folder`. Raises ValueError if it is broken."""
    spec = saved_spec(folder)
    if spec is None:
        raise ValueError(f"{folder} has no tokenizer ({SPEC})")
    if spec["kind"] is ByteTokenizer:
        return ByteTokenizer()
    kind, eos = spec["kind"], spec["eos"]
    if kind is JsonTokenizer and eos is None:
        kind = functools.partial(JsonTokenizer, older=True)
    return _read(kind, inside(folder, spec["file"]), eos)


def saved_identity(folder: Path) -> str | None:
    """Return the identity of a folder's tokenizer, None for none and older ones."""
    spec = saved_spec(folder)
    return None if spec is None else spec["identity"]


def saved_spec(folder: Path) -> dict[str, Any] | None:
    """Return the record of the tokenizer that was saved into `folder`, or None: its "kind", a
    class, its "file", "eos" and "identity", and notes. Raises ValueError if it is broken.
    """
    file = inside(folder, SPEC)
    if not file.is_file():
        return None
    try:
        spec = {"eos": None, "identity": None, **json.loads(file.read_text())}
        if not isinstance(identity := spec["identity"], str | None):
            raise ValueError(f"expected text as its identity, got {identity!r}")
        name = spec["kind"]
        return spec | {"kind": _OWN.get(name) or load(_BY_CLASS[name]), "file": spec["file"]}
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise ValueError(
            f"{file} does not name a tokenizer: {type(error).__name__}: {error}"
        ) from error


def _read(kind: _Open, path: Path, eos: str | None = None) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"no tokenizer file {path}")
    refuse_pointer(path)
    try:
        return kind(path) if eos is None else kind(path, eos)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"cannot read tokenizer {path}: {' '.join(str(error).split())}") from error


def _without_defaults(value: Any) -> Any:
    """Return a JSON value without null and false fields, which some versions do not write."""
    if isinstance(value, dict):
        return {
            name: _without_defaults(inner)
            for name, inner in value.items()
            if inner is not None and inner is not False
        }
    return [_without_defaults(inner) for inner in value] if isinstance(value, list) else value
