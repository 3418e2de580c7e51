"""The other files of --init-from FOLDER: their record, and what an export takes over from it.

Every checkpoint has the record, so an export does not need the folder (docs/weights.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.data.end_of_text import (
    CONFIG,
    GENERATION,
    SPECIAL,
    TOKENIZER,
    listed,
    read_values,
    token_name,
)
from train.data.tokenizer_base import Tokenizer

ADDED = "added_tokens_decoder"  # a field that repeats tokenizer.json
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_LICENSE = re.compile("LICEN[CS]E|NOTICE|COPYING|USE_POLICY")
_MOST_BYTES = 1 << 20  # of a text

# for each file, the fields that still hold after training
_IDS = "(eos|pad)_token_id$"
_NAMES = "(eos|bos|unk|sep|pad|cls|mask)_token$|(additional|extra)_special_tokens$"
_FIELDS = {
    CONFIG: _IDS,
    # training decides how a text begins, the vocabulary which ids have no text, and transformers
    # writes its version
    GENERATION: "(?!bos_token_id|suppress_tokens|transformers_version|_from_model_config)",
    SPECIAL: _NAMES,
    TOKENIZER: f"{_NAMES}|(padding|truncation)_side$|model_input_names$|chat_template$",
}


def read_beside(folder: Path, foreign: str | None) -> dict[str, Any]:
    """Return the record of a Hugging Face folder, in JSON's types.

    folder   its path
    foreign  why the ids of its tokenizer mean nothing to the run's; None if they are the same
    values   the content of its JSON files by name
    texts    chat templates and licences by name

    Raises ValueError if a file is broken, and OSError.
    """
    values = read_values(folder)
    values.get(TOKENIZER, {}).pop(ADDED, None)
    templates = [path for pattern in _TEMPLATES for path in sorted(folder.glob(pattern))]
    licenses = [path for path in sorted(folder.iterdir()) if _is_license(path.name)]
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(errors="surrogateescape")
        for path in (*templates, *licenses)
        if path.is_file() and path.stat().st_size <= _MOST_BYTES
    }
    return {"folder": str(folder), "foreign": foreign, "values": values, "texts": texts}


def _is_license(name: str) -> bool:
    return bool(_LICENSE.search(name.upper()))


@dataclass
class Carried:
    """Parts of a folder that an export takes over: fields by file, texts by name, and notes."""

    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write_texts(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, errors="surrogateescape")


def carry_over(
    state: Mapping[str, Any], tokenizer: Tokenizer, begin: int | None, written: Mapping[str, Any]
) -> Carried:
    """Return the parts that an export takes over from the folder of its first weights: only the
    licences unless the run's tokenizer has the folder's tokens under the same ids.

    state    the checkpoint's
    begin    the token after which training began texts, or None
    written  config.json as it follows from the model
    """
    left = {*written, "auto_map"}  # the code that it names is not copied
    accepted = {name: x for name, x in state.get("accepted", {}).items() if name not in left}
    carried = Carried(accepted)
    if (record := state.get("beside")) is None:
        return carried
    if foreign := record["foreign"]:
        carried.texts = {name: x for name, x in record["texts"].items() if _is_license(name)}
        carried.notes = [f"left out, since {foreign}: all but licences of {record['folder']}"]
        return carried
    carried.texts, values = record["texts"], record["values"]
    taken = {CONFIG: carried.config, GENERATION: carried.generation}
    for place, pattern in _FIELDS.items():
        for name, value in values.get(place, {}).items():
            if value is not None and re.match(pattern, name):
                names = _read_names(value) if re.match(_NAMES, name) else value
                taken.get(place, carried.tokenizer)[name] = names
    taken[TOKENIZER] = carried.tokenizer
    lines = [f"  {place}: {', '.join(fields)}" for place, fields in taken.items() if fields]
    carried.notes = [f"taken over from {record['folder']}:", *carried.texts, *lines]
    _compare_tokens(carried, values, tokenizer, begin, state["data"].get("bos") is not None)
    return carried


def _read_names(value: Any) -> Any:
    """Return the names of special tokens: of one, a list, or by role."""
    if isinstance(value, list):
        return [token_name(token) for token in value]
    if isinstance(value, dict) and "content" not in value:
        return {role: token_name(token) for role, token in value.items()}
    return token_name(value)


def _compare_tokens(
    carried: Carried, values: Mapping[str, Any], tokenizer: Tokenizer, begin: int | None, adds: bool
) -> None:
    """Note tokens that the run's tokenizer lacks, and begin tokens that are not those of training.
    The name of one is left out if transformers `adds` another one to texts.
    """
    for name, value in {**carried.config, **carried.generation, **carried.tokenizer}.items():
        if re.match(f"{_IDS}|{_NAMES}", name):
            tokens = list(value.values()) if isinstance(value, dict) else listed(value)
            if lacking := [x for x in tokens if not _has(tokenizer, x)]:
                shown = ", ".join(map(repr, lacking))
                carried.notes += [f"{name}: the run's tokenizer has no token {shown}"]
    began = "none" if begin is None else repr(tokenizer.name_of(begin))
    for place in (CONFIG, GENERATION):
        given = values.get(place, {}).get("bos_token_id")
        if given is not None and given != begin:
            carried.notes += [f"left out: {place}: bos_token_id {given}: training had {began}"]
    own = carried.tokenizer.get("bos_token")
    if own is not None and adds and tokenizer.id_of(own) != begin:
        del carried.tokenizer["bos_token"]
        carried.notes += [f"left out: {TOKENIZER}: bos_token {own!r}: training had {began}"]


def _has(tokenizer: Tokenizer, token: Any) -> bool:
    if isinstance(token, int):
        return 0 <= token < tokenizer.vocab_size
    return tokenizer.id_of(str(token)) is not None
