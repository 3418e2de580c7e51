"""The choice of what an export takes over from the folder of --init-from (docs/pretraining.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.hf_families import FAMILIES
from models.tensor_files import is_file
from train.checkpoints.beside import GENERATION, SPECIAL, TOKENIZER, ids, is_template, token_name
from train.data.tokenizer import Tokenizer

_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ENDS = ("eos_token_id", "pad_token_id")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SETTINGS = ("padding_side", "truncation_side", "model_input_names")  # no rules of a tokenizer
_BY_TOKENS = re.compile("token_ids?$|_ids$|suppress_tokens$|sequence_bias")
_STAMPS = ("transformers_version", "_from_model_config")
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)(\.index\.json)?$")
_OF_TOKENIZERS = re.compile(
    r"^(tokenizer\.|tokenization_|vocab|merges|added_tokens|special_tokens_map|spiece)"
)
_NO_TOKEN = "the run's tokenizer has no such token"
_REWRITTEN = ("dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters")


@dataclass
class Carried:
    """Parts of a folder that an export takes over, and those that it leaves out. `folder` is None
    if the run had none.
    """

    folder: str | None
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    _left_out: dict[str, list[str]] = field(default_factory=dict)  # reason -> names

    def leave_out(self, reason: str, *names: str) -> None:
        """Note names that are left out for a reason."""
        self._left_out.setdefault(reason, []).extend(names)

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
        left_out = [f"  {_shorten(names)}: {why}" for why, names in self._left_out.items()]
        return "\n".join([*lines, *(["left out:"] if left_out else []), *left_out])


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
    choice = _Choice(record, tokenizer, begin)
    choice.take_generation()
    choice.take_config({*written, *_REWRITTEN}, accepted)
    choice.take_tokenizer()
    choice.take_begin(adds=state["data"].get("bos") is not None)
    same_rope = all(state["model"].get(name) == value for name, value in record["rope"].items())
    choice.take_length(rows, longest, same_rope)
    choice.take_files(written["model_type"])
    return choice.carried


class _Choice:
    """The choice from a record. What names tokens is taken over if the run's tokenizer has them.

    foreign      why the ids of the folder mean nothing to that tokenizer, or None
    no_template  why its chat templates cannot be used, or None
    """

    def __init__(self, record: Mapping[str, Any], tokenizer: Tokenizer, begin: int | None):
        self.carried = Carried(record["folder"])
        self.leave_out = self.carried.leave_out
        self._record, self._values = record, record["values"]
        self._tokenizer, self._begin = tokenizer, begin
        self.foreign = self.no_template = record["foreign"]
        if record["lacking"] and not self.foreign:
            lacking = ", ".join(map(repr, record["lacking"]))
            self.no_template = f"the run's tokenizer lacks {lacking}"
        self._settings = {
            name: value
            for place in (SPECIAL, TOKENIZER)
            for name, value in self._values.get(place, {}).items()
            if value is not None
        }

    def take_generation(self) -> None:
        """Take over sampling settings, stop tokens and padding."""
        for name, value in self._values.get(GENERATION, {}).items():
            if value is None or name == "bos_token_id":  # training decides how a text begins
                continue
            if name in _STAMPS:
                self.leave_out("transformers writes it", f"{GENERATION}: {name}")
            elif name in (*_ENDS, "suppress_tokens"):
                self._take_ids(self.carried.generation, GENERATION, name, value)
            elif _BY_TOKENS.search(name) and self.foreign:
                self.leave_out(self.foreign, f"{GENERATION}: {name}")
            else:
                self.carried.generation[name] = value

    def take_config(self, written: set[str], accepted: Mapping[str, Any]) -> None:
        """Take over accepted fields and the tokens of config.json. All else follows from the
        model.
        """
        given = self._values["config.json"]
        self.carried.config |= accepted
        for name in _ENDS:
            self._take_ids(self.carried.config, "config.json", name, given.get(name))
        known = {*written, *accepted, *_ENDS, "bos_token_id"}
        if others := sorted(n for n, v in given.items() if v is not None and n not in known):
            why = "config.json follows from the run's model"
            self.leave_out(why, f"config.json: {', '.join(others)}")

    def take_tokenizer(self) -> None:
        """Take over special tokens, the chat template and settings of tokenizer_config.json."""
        for name, value in self._settings.items():
            if name in _NAMES or name in _LISTS:
                if names := self._known_names(name, value):
                    self.carried.tokenizer[name] = names
            elif name == "chat_template" and self.no_template:
                self.leave_out(self.no_template, f"{TOKENIZER}: {name}")
            elif name in _SETTINGS or name == "chat_template":
                self.carried.tokenizer[name] = value
            elif name != "model_max_length":
                why = "the run's tokenizer.json says how a text becomes tokens"
                self.leave_out(why, f"{TOKENIZER}: {name}")

    def take_begin(self, adds: bool) -> None:
        """Leave out begin tokens that are not those of training. A name of one may stay, unless
        transformers `adds` another one to texts.
        """
        begin, began = self._begin, "no text after a token"
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
        given = self._settings.get("model_max_length")
        if given is None or given == longest:
            return
        what = f"{TOKENIZER}: model_max_length {given}"
        if not same_rope:
            self.leave_out(f"rotary positions changed; it is {longest} now", what)
        elif given < rows:
            self.leave_out(f"training had rows of {rows} tokens; it is {longest} now", what)
        else:
            self.carried.tokenizer["model_max_length"] = given

    def take_files(self, model_type: str) -> None:
        """Take over chat templates and licences, and explain why other files are left out."""
        texts = self._record["texts"]
        for name, text in texts.items():
            if self.no_template and is_template(name):
                self.leave_out(self.no_template, name)
            else:
                self.carried.texts[name] = text
        handled = {"config.json", GENERATION, TOKENIZER, *texts}
        for name in self._record["files"]:
            if name not in handled and not is_template(name):
                self.leave_out(_why_left_out(name, model_type), name)

    def _take_ids(self, taken: dict[str, Any], place: str, name: str, value: Any) -> None:
        """Take over the ids that are tokens of the run's tokenizer."""
        if value is not None and self.foreign:
            self.leave_out(self.foreign, f"{place}: {name} {value}")
            return
        known = [token for token in ids(value) if 0 <= token < self._tokenizer.vocab_size]
        if unknown := [token for token in ids(value) if token not in known]:
            self.leave_out(_NO_TOKEN, f"{place}: {name} {unknown}")
        if known:
            taken[name] = known[0] if name == "pad_token_id" else known

    def _known_names(self, name: str, value: Any) -> Any:
        """Return the special tokens that the run's tokenizer has: a name, a list, or by role."""
        by_role = isinstance(value, dict) and "content" not in value
        pairs = value.items() if by_role else enumerate(ids(value))
        names = {role: token_name(token) for role, token in pairs}
        known = {
            role: token
            for role, token in names.items()
            if not self.foreign and self._tokenizer.id_of(str(token)) is not None
        }
        if unknown := [token for role, token in names.items() if role not in known]:
            shown = ", ".join(map(repr, unknown))
            self.leave_out(self.foreign or _NO_TOKEN, f"{TOKENIZER}: {name} {shown}")
        if by_role:
            return known
        return list(known.values()) if isinstance(value, list) else known.get(0)


def _why_left_out(name: str, model_type: str) -> str:
    if _WEIGHTS.search(name):
        return "the export has the run's weights"
    if _OF_TOKENIZERS.search(name):
        return "the export has the run's tokenizer"
    if name.endswith(".py"):
        family = FAMILIES[model_type]
        if family.exported_code:
            return "the export has code of bmt_burst"
        if family.releases_code:
            return "no modelling file is written: take the release's"
        return f"transformers has {model_type}"
    if name.upper().startswith("README"):
        return "it describes other weights"
    return "whether it is true of the trained weights is not known"


def _shorten(names: list[str]) -> str:
    """Return all names, but of many files of weights only the first."""
    weights = [name for name in names if _WEIGHTS.search(name)]
    others = [name for name in names if name not in weights[1:]]
    return ", ".join(others) + (f" and {len(weights) - 1} more" if weights[1:] else "")
