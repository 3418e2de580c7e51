"""The choice of what an export takes over from the folder of --init-from (docs/pretraining.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.tensor_files import is_file
from train.checkpoints.beside import GENERATION, SPECIAL, TOKENIZER, is_template, listed, token_name
from train.data.tokenizer import Tokenizer

# for each file the fields that hold also after training, and what decides on the others
_FIELDS = {
    "config.json": ("(eos|pad)_token_id$", "config.json follows from the run's model"),
    # training decides how a text begins, and transformers writes its version
    GENERATION: ("(?!bos_token_id|transformers_version|_from_model_config)", None),
    **dict.fromkeys(
        (SPECIAL, TOKENIZER),
        (
            "(bos|eos|unk|sep|pad|cls|mask)_token$|(additional|extra)_special_tokens$"
            "|(padding|truncation)_side$|model_input_names$|chat_template$",
            "the run's tokenizer.json says how a text becomes tokens",
        ),
    ),
}
_TOKENS = re.compile("(eos|pad)_token_id$|suppress_tokens$|.*_token$|.*_special_tokens$")
_BY_TOKENS = re.compile("token_ids?$|_ids$|suppress_tokens$|sequence_bias")
_NO_TOKEN = "the run's tokenizer has no such token"
_REWRITTEN = ("dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters")
_OTHERS = "the export has its own, or they may not be true of the trained weights"
_SHOWN = 12  # files, of which those of weights may be many


@dataclass
class Carried:
    """Parts of a folder that an export takes over, and names that it leaves out, by the reason.
    `folder` is None if the run had none.
    """

    folder: str | None
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, reason: str, *names: str) -> None:
        self.left_out.setdefault(reason, []).extend(names)

    def write_texts(self, folder: Path) -> None:
        """Write the files into an existing folder."""
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, errors="surrogateescape")

    def describe(self) -> str:
        """List the parts that were taken over and left out, one group a line."""
        if self.folder is None:
            return ""
        places = {"config.json": self.config, GENERATION: self.generation}
        places[TOKENIZER] = self.tokenizer
        lines = [f"taken over from {self.folder}:", *(f"  {name}" for name in self.texts)]
        lines += [f"  {place}: {', '.join(given)}" for place, given in places.items() if given]
        lines = lines if lines[1:] else [f"nothing was taken over from {self.folder}"]
        lines += [f"  left out: {', '.join(names)}: {why}" for why, names in self.left_out.items()]
        return "\n".join(lines)


def carry_over(
    state: Mapping[str, Any],
    tokenizer: Tokenizer,
    begin: int | None,
    rows: int,
    longest: int,
    written: Mapping[str, Any],
) -> Carried:
    """Choose the parts that an export takes over from the folder of its first weights.

    state    the checkpoint's
    begin    the token after which training began texts, or None
    rows     tokens of the longest row of training
    longest  tokens of the longest sequence that the model is for
    written  config.json as it follows from the model
    """
    record, source = state.get("beside"), state["config"].get("init_from")
    left = {*written, "auto_map"}  # the code that it names is not copied
    accepted = {name: x for name, x in state.get("accepted", {}).items() if name not in left}
    if record is None:
        carried = Carried(None if source is None or is_file(source) else source, accepted)
        carried.leave_out("its run began before checkpoints recorded it", "all beside the weights")
        return carried
    choice = _Choice(record, tokenizer)
    choice.carried.config |= accepted
    choice.take_fields({*written, *_REWRITTEN, *accepted, "bos_token_id", "model_max_length"})
    choice.drop_other_begins(begin, adds=state["data"].get("bos") is not None)
    same_rope = all(state["model"].get(name) == value for name, value in record["rope"].items())
    choice.take_length(rows, longest, same_rope)
    choice.take_files()
    return choice.carried


class _Choice:
    """The choice from a record. What names tokens is taken over if the run's tokenizer has them.

    foreign      why the ids of the folder mean nothing to that tokenizer, or None
    no_template  why its chat templates cannot be used, or None
    """

    def __init__(self, record: Mapping[str, Any], tokenizer: Tokenizer):
        self.carried = Carried(record["folder"])
        self.leave_out = self.carried.leave_out
        self._record, self._values, self._tokenizer = record, record["values"], tokenizer
        self.foreign = self.no_template = record["foreign"]
        if record["lacking"] and not self.foreign:
            lacking = ", ".join(map(repr, record["lacking"]))
            self.no_template = f"the run's tokenizer lacks {lacking}"

    def take_fields(self, decided: set[str]) -> None:
        """Take over fields, except those that are `decided`."""
        carried = self.carried
        taken = {"config.json": carried.config, GENERATION: carried.generation}
        for place, (pattern, why) in _FIELDS.items():
            others, into = [], taken.get(place, carried.tokenizer)
            for name, value in self._values.get(place, {}).items():
                if value is None or name in decided:
                    continue
                if not re.match(pattern, name):
                    others.append(name)
                elif name == "chat_template" and self.no_template:
                    self.leave_out(self.no_template, f"{place}: {name}")
                elif _TOKENS.match(name):
                    self._take_tokens(into, place, name, value)
                elif self.foreign and _BY_TOKENS.search(name):
                    self.leave_out(self.foreign, f"{place}: {name}")
                else:
                    into[name] = value
            if others and why:
                self.leave_out(why, f"{place}: {', '.join(sorted(others))}")

    def drop_other_begins(self, begin: int | None, adds: bool) -> None:
        """Leave out begin tokens that are not those of training. A name of one may stay, unless
        transformers `adds` another one to texts.
        """
        began = "no text after a token"
        if begin is not None:
            began = f"texts with {self._tokenizer.name_of(begin)!r}"
        for place in ("config.json", GENERATION):
            given = self._values.get(place, {}).get("bos_token_id")
            if given is not None and given != begin:
                self.leave_out(f"training began {began}", f"{place}: bos_token_id {given}")
        name = self.carried.tokenizer.get("bos_token")
        if name is not None and adds and self._tokenizer.id_of(name) != begin:
            del self.carried.tokenizer["bos_token"]
            self.leave_out(f"training began {began}", f"{TOKENIZER}: bos_token {name!r}")

    def take_length(self, rows: int, longest: int, same_rope: bool) -> None:
        """Take over the most tokens of a text, if it is still true."""
        given = self._values.get(TOKENIZER, {}).get("model_max_length")
        if not isinstance(given, int | float) or given == longest:
            return
        what = f"{TOKENIZER}: model_max_length {given}"
        if not same_rope:
            self.leave_out(f"rotary positions changed; it is {longest} now", what)
        elif given < rows:
            self.leave_out(f"training had rows of {rows} tokens; it is {longest} now", what)
        else:
            self.carried.tokenizer["model_max_length"] = given

    def take_files(self) -> None:
        """Take over chat templates and licences."""
        texts = self._record["texts"]
        for name, text in texts.items():
            if self.no_template and is_template(name):
                self.leave_out(self.no_template, name)
            else:
                self.carried.texts[name] = text
        known = {"config.json", GENERATION, TOKENIZER, *texts}
        others = [x for x in self._record["files"] if x not in known and not is_template(x)]
        more = [f"{len(others) - _SHOWN} more files"] if len(others) > _SHOWN else []
        if others:
            self.leave_out(_OTHERS, *others[:_SHOWN], *more)

    def _take_tokens(self, taken: dict[str, Any], place: str, name: str, value: Any) -> None:
        """Take over the tokens that the run's tokenizer has, by id or name: one, a list, or by
        role.
        """
        by_role = isinstance(value, dict) and "content" not in value
        tokens = value if by_role else dict(enumerate(listed(value)))
        known = {role: token_name(token) for role, token in tokens.items() if self._has(token)}
        if unknown := [repr(token_name(tokens[role])) for role in tokens if role not in known]:
            self.leave_out(self.foreign or _NO_TOKEN, f"{place}: {name} {', '.join(unknown)}")
        if known:
            several = list(known.values()) if isinstance(value, list) else known.get(0)
            taken[name] = known if by_role else several

    def _has(self, token: Any) -> bool:
        name = token_name(token)
        if self.foreign:
            return False
        if isinstance(name, int):
            return 0 <= name < self._tokenizer.vocab_size
        return self._tokenizer.id_of(str(name)) is not None
