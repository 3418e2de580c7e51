"""Files of text and tokens: their kinds, and finding them in folders."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from train.base.wording import counted
from train.data.remote import open_remote

TEXT, RECORDS = ".txt", ".jsonl"  # these may also be compressed
PARQUET, ARROW = ".parquet", ".arrow"  # tables; .arrow only as a shard of a datasets folder
MEGATRON = ".bin"  # tokens, with their .idx beside
_COMPRESSED = (".gz", ".zst")
_READ = ".txt, .jsonl, .parquet, datasets folder or Megatron's .bin and .idx"

Reason = tuple[str, str]  # a file that is not read, described in the singular and the plural

_EMPTY = "empty file", "empty files"
_NAMED_BEFORE = "other name of a file that is read once", "other names of files that are read once"
_FOLDER_LINK = "link to a folder", "links to folders"
_UNREADABLE_FOLDER = "folder that cannot be read", "folders that cannot be read"
_OTHER_KIND = "file of another kind", "files of other kinds"
_NO_FILE = "pipe, socket or device", "pipes, sockets and devices"
_DANGLING = "link to nothing", "links to nothing"
_NOT_COMPRESSED = {
    ".gz": (".gz file that is not compressed by gzip", ".gz files that are not compressed by gzip"),
    ".zst": (
        ".zst file that is not compressed by zstd",
        ".zst files that are not compressed by zstd",
    ),
}
_STARTS = {
    ".gz": rb"\x1f\x8b",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # or a skippable frame
}
_NOT_LISTED = "arrow file that no state.json lists", "arrow files that no state.json lists"


class Unread:
    """Files that were found but not read: their number for each reason, and the first one of
    each.
    """

    def __init__(self):
        self._first: dict[Reason, Path] = {}
        self._count: dict[Reason, int] = {}

    def add(self, reason: Reason, path: Path) -> None:
        self._first.setdefault(reason, path)
        self._count[reason] = self._count.get(reason, 0) + 1

    def lines(self) -> list[str]:
        counts = sorted(self._count.items())
        return [
            f"{counted(count, *reason)}, such as {self._first[reason]}" for reason, count in counts
        ]


@dataclass(frozen=True)
class TextFile:
    """A file to read.

    path  its path, by which it is opened and named in messages
    name  its path relative to the input in which it was found, "/" between folders; for a file that
          is itself an input, its own name. It stays the same if the input is moved
    url   its address, by which it is opened and named instead; `path` then only says its kind
    """

    path: Path
    name: str
    url: str | None = None

    @staticmethod
    def found(path: Path, source: Path) -> TextFile:
        """Return the file at `path`, which was found in the input `source` or is that input."""
        return TextFile(path, path.name if path == source else path.relative_to(source).as_posix())

    @staticmethod
    def remote(url: str) -> TextFile:
        """Return the file at an address."""
        path = Path(urlsplit(url).path)
        return TextFile(path, path.name, url)

    def __str__(self) -> str:
        return self.url or str(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @property
    def compression(self) -> str | None:
        return compression(self.path)

    def open(self) -> BinaryIO:
        """Open the file. Raises OSError if it cannot be read."""
        return open_remote(self.url) if self.url else open(self.path, "rb")


def compression(path: Path) -> str | None:
    """Return ".gz" or ".zst" for a compressed file, else None."""
    suffix = path.suffix.lower()
    return suffix if suffix in _COMPRESSED else None


def kind_of(path: Path) -> str:
    """Return how a file is read: RECORDS, PARQUET, ARROW, MEGATRON, or else its suffix in lower
    case, as text. For compressed text and records, the suffix is the one before .gz or .zst.
    """
    return Path(path.stem if compression(path) else path.name).suffix.lower()


def find_files(
    inputs: list[str], pattern: str | None, exclude: list[str]
) -> tuple[list[TextFile], Unread]:
    """Return the files that `inputs` name, and the files that were found but are not read.

    Folders are searched for names that match `pattern` (default: all kinds of files that are read,
    in either case). Files are sorted within a folder. A file that is named several times is read
    once. Links to files are followed. Links to folders are followed only if they are an input
    themselves. Of a Hugging Face datasets folder, the shards that its state.json lists are read. An
    input may be Megatron's prefix, without .bin or .idx.

    Raises ValueError for an input that is "", does not exist, cannot be opened or has an unknown
    suffix. Also raises it for a folder without any match, for missing shards, and for a folder of
    several splits.
    """
    if "" in inputs:
        raise ValueError('--input must not be ""; the current folder is .')
    files: list[TextFile] = []
    unread, seen = Unread(), set()
    for path in map(_file_of_tokens, map(Path, inputs)):
        if path.is_dir():
            found, others = _search_folder(path, pattern, exclude)
            for other, reason in others:
                unread.add(reason, other)
            if not found:
                reasons = "; ".join(unread.lines()) or "it is empty"
                raise ValueError(
                    f"folder {path} has no file that matches {pattern or _READ}: {reasons}"
                )
        else:
            _check_named(path)
            found = [path]
        for file in found:
            status = file.stat()
            if (status.st_dev, status.st_ino) in seen:
                unread.add(_NAMED_BEFORE, file)
            elif not status.st_size:
                unread.add(_EMPTY, file)
            else:
                files.append(TextFile.found(file, path))
            seen.add((status.st_dev, status.st_ino))
    if not files:
        raise ValueError(f"there is no text to read: {'; '.join(unread.lines())}")
    return files, unread


def check_holds_text(files: Sequence[TextFile], reader: str) -> None:
    """Raise ValueError for a file that `reader` cannot read: tables and tokens."""
    for file in files:
        if file.kind in (PARQUET, ARROW, MEGATRON):
            raise ValueError(f"{file.path}: {reader} is made from .txt and .jsonl files only")


def _file_of_tokens(path: Path) -> Path:
    """Return the .bin that an input means by Megatron's prefix or .idx, or the input itself."""
    if kind_of(path) == ".idx":
        return path.with_suffix(MEGATRON)
    if not path.exists() and path.with_name(f"{path.name}.idx").is_file():
        return path.with_name(f"{path.name}{MEGATRON}")
    return path


def _check_named(path: Path) -> None:
    """Raise ValueError if a file that is itself an input cannot be read."""
    if not path.exists():
        raise ValueError(
            f"no such input: {path}" + (", a link to nothing" if path.is_symlink() else "")
        )
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if kind_of(path) == ARROW:
        raise ValueError(
            f"{path} is one shard: give its folder, as Dataset.save_to_disk writes it, with a "
            "state.json"
        )
    if kind_of(path) == MEGATRON and not path.with_suffix(".idx").is_file():
        raise ValueError(f"{path} has no {path.with_suffix('.idx').name} beside it")
    if kind_of(path) not in (TEXT, RECORDS, PARQUET, MEGATRON):
        raise ValueError(
            f"{path} is neither .txt nor .jsonl, compressed (.gz, .zst) or not, .parquet, nor "
            "Megatron's .bin; to read other text, give its folder and --glob"
        )
    if problem := _find_problem(path):
        raise ValueError(f"{path} is not read: it is a {problem[0]}")


def _search_folder(
    folder: Path, pattern: str | None, exclude: list[str]
) -> tuple[list[Path], list[tuple[Path, Reason]]]:
    """Return the files to read in a folder and its subfolders, sorted, and the other files with
    their reasons.
    """
    found: list[Path] = []
    others: list[tuple[Path, Reason]] = []

    def unreadable(error: OSError) -> None:
        others.append((Path(error.filename), _UNREADABLE_FOLDER))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(place)
        folders[:] = [name for name in folders if name not in exclude]
        others += [(here / name, _FOLDER_LINK) for name in folders if (here / name).is_symlink()]
        if "dataset_dict.json" in names:
            _check_splits(here, exclude)
        names = [name for name in names if name not in exclude]
        shards = _listed_shards(here) if "state.json" in names else None
        for path in (here / name for name in names if not _is_companion(here / name, shards)):
            if pattern and not path.absolute().match(pattern):
                why = f"file that does not match {pattern}", f"files that do not match {pattern}"
                others.append((path, why))
            elif reason := _find_other_kind(path, shards, bool(pattern)) or _find_problem(path):
                others.append((path, reason))
            else:
                found.append(path)
    return sorted(found), sorted(others)


def _is_companion(path: Path, shards: list[str] | None) -> bool:
    """Whether a file belongs to others that are read: an .idx, or the description of a dataset.

    `shards` are the shards of its folder; None if that is no datasets folder.
    """
    if shards is not None and path.name in ("state.json", "dataset_info.json"):
        return True
    tokens = path.with_suffix(MEGATRON)
    return path.name == "dataset_dict.json" or (kind_of(path) == ".idx" and tokens.is_file())


def _find_other_kind(path: Path, shards: list[str] | None, matched: bool) -> Reason | None:
    """Return the reason that a file is of no kind that is read, or None. Files that --glob has
    `matched` are text at least.
    """
    kind = kind_of(path)
    if kind == ARROW:
        return None if path.name in (shards or ()) else _NOT_LISTED
    if kind == MEGATRON:
        return None if path.with_suffix(".idx").is_file() else _OTHER_KIND
    return None if matched or kind in (TEXT, RECORDS, PARQUET) else _OTHER_KIND


def _listed_shards(folder: Path) -> list[str] | None:
    """Return the shards that the state.json of a datasets folder lists, or None if it is not one.
    Raises ValueError if one is missing.
    """
    try:
        listed = json.loads((folder / "state.json").read_bytes())["_data_files"]
        shards = [shard["filename"] for shard in listed]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None  # a file of another program
    for shard in shards:
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / 'state.json'} lists {shard}, which is missing")
    return shards


def _check_splits(folder: Path, exclude: list[str]) -> None:
    """Raise ValueError if a folder that DatasetDict.save_to_disk wrote has several splits."""
    try:
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        splits = [split for split in splits if split not in exclude]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / 'dataset_dict.json'} has no list of splits: {error}"
        ) from error
    if len(splits) > 1:
        raise ValueError(
            f"{folder} has the splits {', '.join(splits)}: give the folders of those to read, such "
            f"as {folder / splits[0]}, or name the others in --exclude"
        )


def _find_problem(path: Path) -> Reason | None:
    """Return the reason that keeps a file from being read, or None."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return _NO_FILE
        with open(path, "rb") as file:
            start = file.read(4)
    except FileNotFoundError:
        return _DANGLING
    except OSError as error:
        why = f"that cannot be read ({error.strerror})"
        return f"file {why}", f"files {why}"
    by = compression(path)
    if by is None or not start or re.match(_STARTS[by], start):
        return None
    return _NOT_COMPRESSED[by]
