"""Finding text files, and reading the documents in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK = 1 << 20  # bytes of text that are tokenized at once
_LISTED = 20  # bad lines that are listed one by one


@dataclass
class BadLines:
    """Lines that could not be used."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, path: Path, line: int, reason: str) -> None:
        self.count += 1
        if len(self.first) < _LISTED:
            self.first.append(f"{path}:{line}: {reason}")


def find_files(inputs: list[str], pattern: str | None, exclude: list[str]) -> list[Path]:
    """The files that `inputs` name, folders searched for `pattern` (default: .txt and .jsonl), in sorted order.

    Raises ValueError for an input that does not exist, is of an unknown kind, or a folder without any match.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = sorted(p for glob in ([pattern] if pattern else ["*.txt", "*.jsonl"]) for p in path.rglob(glob))
            found = [p for p in found if p.is_file() and not set(p.relative_to(path).parts) & set(exclude)]
            if not found:
                raise ValueError(f"folder {path} has no file that matches {pattern or '*.txt or *.jsonl'}")
            files += found
        elif not path.is_file():
            raise ValueError(f"no such input: {path}")
        elif path.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"{path} is neither .txt nor .jsonl; other text is taken from a folder with --glob")
        else:
            files.append(path)
    return files


def read_documents(
    path: Path, json_field: str, bad: BadLines, on_bytes: Callable[[int], object]
) -> Iterator[tuple[str, Iterator[str]]]:
    """Documents of a file: a name for each and its text in pieces, to be read before the next document is asked for.

    `on_bytes` is told how many bytes of the file were read.
    """
    if path.suffix == ".jsonl":
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                on_bytes(len(line))
                text = _json_text(line, json_field, path, number, bad)
                if text is not None:
                    yield f"{path}:{number}", iter([text])
    else:
        yield str(path), _plain_text(path, bad, on_bytes)


def _json_text(line: bytes, json_field: str, path: Path, number: int, bad: BadLines) -> str | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8, or nested too deep
        bad.add(path, number, f"not JSON: {error}")
        return None
    text = record.get(json_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        bad.add(path, number, f"no text in field {json_field!r}")
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad.add(path, number, f"not Unicode: {error.reason} at character {error.start}")
        return None
    return text


def _plain_text(path: Path, bad: BadLines, on_bytes: Callable[[int], object]) -> Iterator[str]:
    before = 0  # lines read earlier
    with open(path, "rb") as file:
        while lines := file.readlines(_CHUNK):
            on_bytes(sum(map(len, lines)))
            good = []
            for number, line in enumerate(lines, before + 1):
                try:
                    good.append(line.decode())
                except UnicodeDecodeError as error:
                    bad.add(path, number, f"not UTF-8: {error.reason} at byte {error.start}")
            before += len(lines)
            yield "".join(good)
