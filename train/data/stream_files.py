"""The folder of a stream, which `prepare_data.py --stream` writes and pretrain.py reads.

It has the tokenizer, and index.json with the files, their sizes, and how to read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from train.base.wording import counted
from train.data.files import ARROW, JSON, PARQUET, RECORDS, TextFile
from train.data.find import METADATA, Unread, find_files, is_metadata
from train.data.forms import AUTO
from train.data.remote import has_wildcards, is_remote, list_remote
from train.data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class StreamFiles:
    """The files of a stream, each with its bytes, and the options of prepare_data.py for them."""

    files: tuple[tuple[TextFile, int], ...]
    field: str
    shuffle_tokens: int
    max_bad: float
    max_bad_shards: int
    format: str = AUTO

    def write(self, folder: Path, tokenizer: Tokenizer, **notes: object) -> None:
        """Write the folder of the stream. Its index also gets `notes`."""
        tokenizer.save(folder)
        stream = {
            "files": [[str(file), size] for file, size in self.files],
            **{name: getattr(self, name) for name in _SETTINGS},
        }
        facts = ("vocab_size", "eos_id", "bos_id")
        index = {name: getattr(tokenizer, name) for name in facts} | {"stream": stream} | notes
        (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the index of a stream. Raises ValueError if a local file has changed."""
        path = folder / "index.json"
        try:
            # older streams have no format
            stream = {"format": AUTO, **json.loads(path.read_text())["stream"]}
            settings = {name: stream[name] for name in _SETTINGS}
            files = tuple(
                (TextFile.at(name).in_form(stream["format"]), int(size))
                for name, size in stream["files"]
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} describes no stream: {error!r}") from error
        for file, size in files:
            if file.url is None and (not file.path.is_file() or file.path.stat().st_size != size):
                raise ValueError(
                    f"{file} is missing or has changed since {path} was written: expected "
                    f"{counted(size, 'byte')}; run prepare_data.py --stream again"
                )
        return cls(files, **settings)

    @property
    def identity(self) -> dict[str, Any]:
        """The facts on which rows depend."""
        facts = [[[str(file), size] for file, size in self.files], self.field]
        facts += [self.format] if self.format != AUTO else []
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return {"digest": digest, "shuffle_tokens": self.shuffle_tokens}


_WITH_RECORDS = (*RECORDS, JSON)  # endings
_SETTINGS = ("field", "shuffle_tokens", "max_bad", "max_bad_shards", "format")


def is_stream(folder: str) -> bool:
    """Whether a folder was written by `prepare_data.py --stream`."""
    try:
        return "stream" in json.loads((Path(folder) / "index.json").read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False  # opening it as another kind of folder reports the error


def find_streamed(
    inputs: Sequence[str], pattern: str | None, exclude: list[str], asked: str = AUTO
) -> tuple[list[tuple[TextFile, int]], list[TextFile], Unread]:
    """Return the files that `inputs` name with their bytes, those to check before a run, and those
    that are not read. Inputs may be addresses, with wildcards. The first file of each is checked.
    Raises ValueError as `find_files`, and for a file without records.
    """
    local = [name for name in inputs if not is_remote(name)]
    found, unread = find_files(local, pattern, exclude, asked) if local else ([], Unread())
    files = [(replace(x, path=x.path.absolute()), x.path.stat().st_size) for x in found]
    checked = [file for file, _ in files]
    for url in filter(is_remote, inputs):
        before = len(files)
        for name, size in list_remote(url):
            file = TextFile.at(name).in_form(asked)
            if has_wildcards(url) and is_metadata(file.path):
                unread.add(METADATA, name)
            else:
                files.append((file, size))
        checked += [file for file, _ in files[before : before + 1]]
    for file, _ in files:
        has_records = file.has_records if file.form else file.kind in _WITH_RECORDS
        if not has_records and file.kind not in (PARQUET, ARROW):
            raise ValueError(
                f"{file}: a stream is read from .jsonl and .parquet files and datasets folders, "
                "not from plain text: prepare this file without --stream"
            )
    if not files:
        raise ValueError(f"there is no text to read: {'; '.join(unread.lines())}")
    return files, checked, unread
