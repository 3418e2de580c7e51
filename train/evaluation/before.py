"""An earlier evaluation that another one is compared with: the same tasks and texts, in a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.json_files import read_json
from train.base.wording import flag

_PATHS = ("data", "text")  # options whose texts are compared instead
_FACTS = "grid", "options", "texts", "tasks"  # of results, by name
RESULTS, TABLE = "results.json", "before_after.md"


@dataclass(frozen=True)
class Before:
    """The results of the evaluation in `folder`. Raises ValueError if it has none."""

    folder: Path
    values: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> Before:
        file = folder / RESULTS
        values = read_json(file) if file.is_file() else {}
        got = None if values else f"no {RESULTS}"
        if values and not all(isinstance(values.get(name), dict) for name in _FACTS):
            got = f"{RESULTS} without {', '.join(_FACTS)}, as older versions wrote it"
        if got:
            raise ValueError(f"--before {folder}: expected a folder of evaluate.py, got {got}")
        return Before(folder, values)

    def fill(self, given: dict[str, Any], known: set[str]) -> None:
        """Fill in the options that are not given. Raises ValueError for others than before, and for
        options that are not `known`.
        """
        options = {**self.values["grid"], **self.values["options"]}
        if other := sorted(options.keys() - given.keys() - known):
            raise ValueError(f"--before {self.folder} has options of another version: {other}")
        for name, value in options.items():
            before = tuple(value) if isinstance(value, list) else value
            if given.get(name) is None:
                given[name] = before
            elif given[name] != before and name not in _PATHS:
                option = "--needles" if name == "hidden" else flag(name)
                raise ValueError(
                    f"expected {option} {before}, as in --before {self.folder}, got "
                    f"{given[name]}: leave it out"
                )

    def check_texts(self, texts: dict[str, Any]) -> None:
        """Raise ValueError if other texts were read before."""
        texts = json.loads(json.dumps(texts))
        for name, before in self.values["texts"].items():
            if texts.get(name) != before:
                advice = "; --bos sets it" if name == "begin token" else ""
                raise ValueError(
                    f"--before {self.folder} read other texts: expected {name} {before}, got "
                    f"{texts.get(name)}{advice}"
                )

    def compare(self, model: str, tasks: dict[str, Any]) -> str:
        """Return a table of the results before and of `tasks`, those of `model`."""
        before, after = (dict(_find_rows(each)) for each in (self.values["tasks"], tasks))
        lines = [f"before: {self.values.get('model')}", f"after: {model}", ""]
        lines += ["| task | tokens | | before | after |", "| --- | --- | --- | --- | --- |"]
        lines += [f"| {' | '.join((*row, before[row], after[row]))} |" for row in after]
        return "\n".join(lines)


def _find_rows(tasks: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield the rows of a table, each with its value: shares that were found, or perplexities."""
    for name, result in tasks.items():
        for cell in result.get("cells", ()):
            level = "depth" if "depth" in cell else "hops"
            place = f"{level} {cell[level]:g}"
            yield (f"{name}, found", f"{cell['length']:,}", place), f"{cell['found']:.0%}"
        for source, found in {"": result, **result.get("sources", {})}.items():
            task = f"{name}{source and f' in {source}'}, perplexity"
            for each in found.get("bins", ()):
                place, value = f"from {each['start']:,}", each["perplexity"]
                yield (task, f"{each['length']:,}", place), "-" if value is None else f"{value:.3f}"
