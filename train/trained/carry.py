"""The parts of the folder of --init-from that an export takes over (docs/weights.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.tensor_files import is_file
from train.checkpoints.beside import GENERATION, SPECIAL, TOKENIZER, is_template, listed, token_name
from train.data.tokenizer import Tokenizer

# for each file, the fields that still hold after training
_FIELDS = {
    "config.json": "(eos|pad)_token_id$",
    # training decides how a text begins, and transformers writes its version
    GENERATION: "(?!bos_token_id|transformers_version|_from_model_config)",
    SPECIAL: "(eos|bos|unk|sep|pad|cls|mask)_token$|(additional|extra)_special_tokens$",
}
_FIELDS[TOKENIZER] = (
    f"{_FIELDS[SPECIAL]}|(padding|truncation)_side$|model_input_names$|chat_template$"
)
_TOKENS = re.compile(
    "_token$|token_ids?$|_ids$|(suppress|special)_tokens$|sequence_bias|chat_template"
)


@dataclass
class Carried:
    """Parts of a folder that an export takes over, with notes. `folder` is None without one."""

    folder: str | None
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write_texts(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, errors="surrogateescape")

    def describe(self) -> str:
        """List the parts that were taken over, and the notes, one a line."""
        if self.folder is None:
            return ""
        places = {"config.json": self.config, GENERATION: self.generation}
        places[TOKENIZER] = self.tokenizer
        lines = [f"taken over from {self.folder}:", *(f"  {name}" for name in self.texts)]
        lines += [f"  {place}: {', '.join(given)}" for place, given in places.items() if given]
        lines = lines if lines[1:] else [f"nothing was taken over from {self.folder}"]
        return "\n".join([*lines, *self.notes])


def carry_over(
    state: Mapping[str, Any],
    tokenizer: Tokenizer,
    begin: int | None,
    rows: int,
    written: Mapping[str, Any],
) -> Carried:
    """Return the parts that an export takes over from the folder of its first weights. Those that
    name tokens need a run whose tokenizer has the folder's tokens under the same ids.

    state    the checkpoint's
    begin    the token after which training began texts, or None
    rows     tokens of the longest row of training
    written  config.json as it follows from the model
    """
    record, source = state.get("beside"), state["config"].get("init_from")
    left = {*written, "auto_map"}  # the code that it names is not copied
    accepted = {name: x for name, x in state.get("accepted", {}).items() if name not in left}
    if record is None:
        carried = Carried(None if source is None or is_file(source) else source, accepted)
        carried.notes += ["left out: all beside the weights, which older runs did not record"]
        return carried
    carried, values = Carried(record["folder"], accepted), record["values"]
    _take_fields(carried, values, record["texts"], record["foreign"])
    adds = state["data"].get("bos") is not None
    _compare_tokens(carried, values, tokenizer, begin, adds)
    given = values.get(TOKENIZER, {}).get("model_max_length")
    same_rope = all(state["model"].get(name) == value for name, value in record["rope"].items())
    if isinstance(given, int | float) and given >= rows and same_rope:
        carried.tokenizer["model_max_length"] = given
    return carried


def _take_fields(
    carried: Carried, values: Mapping[str, Any], texts: Mapping[str, str], foreign: str | None
) -> None:
    """Take over fields and texts. If tokens are `foreign`, which is the reason, leave out what
    names them.
    """
    taken, left_out = {"config.json": carried.config, GENERATION: carried.generation}, []
    for place, pattern in _FIELDS.items():
        for name, value in values.get(place, {}).items():
            if value is None or not re.match(pattern, name):
                continue
            if foreign and _TOKENS.search(name):
                left_out.append(f"{place}: {name}")
            else:
                names = re.match(_FIELDS[SPECIAL], name)
                taken.get(place, carried.tokenizer)[name] = _read_names(value) if names else value
    for name, text in texts.items():
        if foreign and is_template(name):
            left_out.append(name)
        else:
            carried.texts[name] = text
    if left_out:
        carried.notes += [f"left out, since {foreign}: {', '.join(left_out)}"]


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
    named = {**carried.config, **carried.generation, **carried.tokenizer}
    for name, value in named.items():
        if re.match(rf"{_FIELDS['config.json']}|{_FIELDS[SPECIAL]}", name):
            tokens = list(value.values()) if isinstance(value, dict) else listed(value)
            if lacking := [x for x in tokens if not _has(tokenizer, x)]:
                shown = ", ".join(map(repr, lacking))
                carried.notes += [f"{name}: the run's tokenizer has no token {shown}"]
    began = "none" if begin is None else repr(tokenizer.name_of(begin))
    for place in ("config.json", GENERATION):
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
