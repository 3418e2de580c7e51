"""A record of the other files of --init-from FOLDER, for exports of the run (trained/carry.py).

It holds the small files that may still be true of trained weights. Every checkpoint has it, so an
export does not need the folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from models.huggingface import read_config
from models.json_files import read_json
from train.data.same_tokenizer import extends, find_tokenizers
from train.data.tokenizer import Tokenizer
from train.registry import KINDS, Kind

GENERATION, TOKENIZER, SPECIAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TEMPLATE = "chat_template.jinja"
_JSON = ("config.json", GENERATION, TOKENIZER, SPECIAL)
_TEMPLATES = (TEMPLATE, "chat_template.json", "additional_chat_templates/*.jinja")
_LICENSE = re.compile("LICEN[CS]E|NOTICE|COPYING|USE_POLICY")
_MOST_BYTES = 1 << 20  # of a text
ADDED = "added_tokens_decoder"  # a field that repeats tokenizer.json


def read_beside(
    folder: Path, tokenizer: Tokenizer, kind: Kind = KINDS[0], accept: Collection[str] = ()
) -> dict[str, Any]:
    """Return the record of a Hugging Face folder, in JSON's types. `accept` is read_config's.

    folder   its path
    foreign  why the ids of its tokenizer mean nothing to `tokenizer`, the run's; None if they do
    rope     its rotary positions, as fields of CPMConfig
    values   the content of its JSON files by name
    texts    chat templates and licences by name

    For other kinds than the dense CPM it has only `folder`: their exports take nothing over.
    Raises ValueError if a file is broken, and OSError.
    """
    if kind is not KINDS[0]:
        return {"folder": str(folder)}
    values = read_values(folder)
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(errors="surrogateescape")
        for path in _find_texts(folder)
    }
    values.get(TOKENIZER, {}).pop(ADDED, None)
    shape = read_config(folder, accept).to_dict()
    found = [other for _, other in find_tokenizers(folder, tokenizer.eos)]
    opened = [other for other in found if isinstance(other, Tokenizer)]
    sizes, generation = [other.vocab_size for other in opened], values.get(GENERATION, {})
    if sizes and (suppressed := listed(generation.get("suppress_tokens"))):
        # ids that no tokenizer of the folder has are padding
        generation["suppress_tokens"] = [token for token in suppressed if token < max(sizes)]
    foreign = None
    if not found:
        foreign = "it has no tokenizer.json or tokenizer.model to compare with the run's tokenizer"
    elif not any(extends(tokenizer, other) for other in opened):
        foreign = "the run has another tokenizer"
    return {
        "folder": str(folder),
        "foreign": foreign,
        "rope": {name: shape[name] for name in ("rope_theta", "rope_scaling")},
        "values": values,
        "texts": texts,
    }


def read_values(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a folder's JSON files, by name. Raises ValueError and OSError."""
    return {name: read_json(folder / name) for name in _JSON if (folder / name).is_file()}


def token_name(token: Any) -> Any:
    """Return the name of a special token, which may be written with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def listed(value: Any) -> list[Any]:
    """Return the ids of a field that has one id, a list, or none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def is_template(name: str) -> bool:
    """Whether a file of this name is a chat template."""
    return name.startswith((TEMPLATE, "chat_template.json", "additional_chat_templates/"))


def _find_texts(folder: Path) -> Iterator[Path]:
    """Yield the chat templates and licences of a folder."""
    for pattern in _TEMPLATES:
        yield from sorted(folder.glob(pattern))
    for path in sorted(folder.iterdir()):
        is_license = _LICENSE.search(path.name.upper()) and path.is_file()
        if is_license and path.stat().st_size <= _MOST_BYTES:
            yield path
