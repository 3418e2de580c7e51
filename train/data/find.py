"""The search for the files that --input names, also in folders."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.base.wording import naming
from train.data.files import (
    ARROW,
    JSON,
    MEGATRON,
    NO_TEXT,
    PARQUET,
    RECORDS,
    TEXT,
    NotInLines,
    TextFile,
    compression,
    find_form,
    kind_of,
    named,
)
from train.data.forms import AUTO, FORMATS, PLAIN

_READ = ".txt, .jsonl, .json, .parquet, datasets folder or Megatron's .bin and .idx"
METADATA = "hidden, or metadata"  # a reason that a file is not read

# files that describe data or models in the same folder
_DESCRIPTIONS = re.compile(
    r"(state|dataset_infos?|dataset_dict|metadata|manifest|index|croissant|(generation_|tokenizer_)?"
    r"config|tokenizer|special_tokens_map|.*\.index)\.json"
    r"|(checksums?|(md5|sha\d+)(sums?)?)(\.(txt|json))?",
    re.IGNORECASE,
)


def add_inputs(parser: argparse.ArgumentParser, others: str) -> None:
    """Add the options that choose files: --input, --format, --glob and --exclude."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help=f".txt, .jsonl or .json files, also as .gz or .zst, or folders; {others}",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=AUTO,
        help="a JSON record a line (lines), one JSON array of records (array), or plain text, even "
        "if it is JSON (text). By default, the content of each file decides",
    )
    parser.add_argument("--glob", help="in folders, read the files that match this pattern")
    parser.add_argument(
        "--exclude", nargs="*", default=[], help="in folders, skip folders and files by name"
    )


class Unread:
    """Files that were found but not read, by the reason."""

    def __init__(self):
        self._found: dict[str, list[Path | str]] = {}

    def add(self, reason: str, path: Path | str) -> None:
        self._found.setdefault(reason, []).append(path)

    def lines(self) -> list[str]:
        """Return a line for each reason: the first file, and the number of others."""
        return [
            f"{first} ({reason})" + (f" and {len(others):,} more" if others else "")
            for reason, (first, *others) in sorted(self._found.items())
        ]

    def report(self) -> None:
        for line in self.lines():
            print(f"not read: {line}", file=sys.stderr)


def find_files(
    inputs: list[str], pattern: str | None, exclude: list[str], asked: str = AUTO
) -> tuple[list[TextFile], Unread]:
    """Return the files that `inputs` name, in the form `asked`, and those that are not read.

    Files are sorted within a folder, and each is read once. Links to folders are followed only if
    they are an input. Hidden files and files that describe others are read only if `pattern` is
    their name. Raises ValueError for inputs that cannot be read.
    """
    if "" in inputs:
        raise ValueError('--input must not be ""; the current folder is .')
    files: list[TextFile] = []
    unread, seen = Unread(), set()
    for path in map(_file_of_tokens, map(Path, inputs)):
        for file in _search(path, pattern, exclude, unread):
            status = file.stat()
            if (status.st_dev, status.st_ino) in seen:
                unread.add("another name of a file that is read once", file)
            elif not status.st_size:
                unread.add("empty", file)
            elif text := _open_form(TextFile.found(file, path), asked, file != path, pattern):
                files.append(text)
            else:
                unread.add("one JSON object over several lines, which jq -c . writes on one", file)
                continue  # it is refused if it is an input itself
            seen.add((status.st_dev, status.st_ino))
    if not files:
        raise ValueError(f"there is no text to read: {'; '.join(unread.lines())}")
    return files, unread


def check_holds_text(files: Sequence[TextFile], reader: str) -> None:
    """Raise ValueError for a file that `reader` cannot read: tables and tokens."""
    for file in files:
        if file.kind in NO_TEXT:
            raise ValueError(f"{file.path}: {reader} is made from .txt and .jsonl files only")


def is_metadata(path: Path) -> bool:
    """Whether a file is hidden, or describes other files by its name."""
    name = path.stem if compression(path) else path.name
    return name.startswith(".") or bool(_DESCRIPTIONS.fullmatch(name))


def _file_of_tokens(path: Path) -> Path:
    """Return the .bin that an input means by Megatron's prefix or .idx, or the input itself."""
    if kind_of(path) == ".idx":
        return path.with_suffix(MEGATRON)
    if not path.exists() and path.with_name(f"{path.name}.idx").is_file():
        return path.with_name(f"{path.name}{MEGATRON}")
    return path


def _open_form(file: TextFile, asked: str, in_folder: bool, pattern: str | None) -> TextFile | None:
    """Return the file with its form, or None for a found .json that may describe other files.
    Raises ValueError as `find_form`, and for plain text that neither a .txt nor `pattern` is.
    """
    file = file.in_form(asked)
    if file.form or file.kind in NO_TEXT:
        return file
    with named(file), file.open() as raw:
        try:
            found = find_form(file, raw)
        except NotInLines:
            if in_folder and not pattern and file.kind == JSON:
                return None
            raise
    if found.form == PLAIN and file.kind != TEXT and not in_folder:
        raise ValueError(
            f"{file} is neither .txt nor .jsonl or .json, compressed (.gz, .zst) or not, .parquet, "
            f"nor Megatron's .bin, and holds no JSON: --format {PLAIN} reads it as plain text"
        )
    return found


def _search(path: Path, pattern: str | None, exclude: list[str], unread: Unread) -> list[Path]:
    """Return the file that an input is, or the files of a folder and its subfolders. Raises
    ValueError if there is none, or it cannot be read. `unread` gets the other files of the folder.
    """
    if not path.is_dir():
        _check_named(path)
        return [path]
    found: list[Path] = []
    for file, reason in _walk(path, pattern, exclude):
        if reason is None:
            found.append(file)
        else:
            unread.add(reason, file)
    if not found:
        reasons = "; ".join(unread.lines()) or "it is empty"
        raise ValueError(f"folder {path} has no file that matches {pattern or _READ}: {reasons}")
    return sorted(found)


def _check_named(path: Path) -> None:
    """Raise ValueError if a file that is itself an input cannot be read."""
    if not path.exists():
        raise ValueError(
            f"no such input: {path}" + (", a link to nothing" if path.is_symlink() else "")
        )
    if kind_of(path) == ARROW:
        raise ValueError(
            f"{path} is one shard: give its folder, as Dataset.save_to_disk writes it, with a "
            "state.json"
        )
    if kind_of(path) == MEGATRON and not path.with_suffix(".idx").is_file():
        raise ValueError(f"{path} has no {path.with_suffix('.idx').name} next to it")
    if problem := _find_problem(path):
        raise ValueError(f"{path} is not read: it is {problem}")


def _walk(
    folder: Path, pattern: str | None, exclude: list[str]
) -> Iterator[tuple[Path, str | None]]:
    """Yield the files of a folder and its subfolders, with the reason not to read each, or None."""
    unreadable: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=unreadable.append):
        here = Path(place)
        folders[:] = sorted({*folders} - {*exclude})
        yield from ((here / name, "a hidden folder") for name in folders if name.startswith("."))
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [here / name for name in folders if (here / name).is_symlink()]
        yield from ((link, "a link to a folder") for link in links)
        if "dataset_dict.json" in names:
            _check_splits(here, exclude)
        shards = _listed_shards(here) if "state.json" in names else None
        for path in (here / name for name in sorted({*names} - {*exclude})):
            if not _belongs_to_others(path, shards):
                yield path, _find_reason(path, pattern, shards)
    yield from ((Path(error.filename), "a folder that cannot be read") for error in unreadable)


def _belongs_to_others(path: Path, shards: list[str] | None) -> bool:
    """Whether a file belongs to others that are read: `shards` of a dataset, or a .bin."""
    if shards is not None and path.name in ("state.json", "dataset_info.json"):
        return True
    tokens = path.with_suffix(MEGATRON)
    return path.name == "dataset_dict.json" or (kind_of(path) == ".idx" and tokens.is_file())


def _find_reason(path: Path, pattern: str | None, shards: list[str] | None) -> str | None:
    """Return why a file of a folder is not read, or None. Files that --glob matches are text."""
    kind = kind_of(path)
    if pattern and not path.absolute().match(pattern):
        return f"does not match {pattern}"
    if is_metadata(path) and path.name != Path(pattern or "").name:
        return METADATA
    if kind == ARROW and path.name not in (shards or ()):
        return "an arrow file that no state.json lists"
    if kind == MEGATRON:
        is_known = path.with_suffix(".idx").is_file()
    else:
        is_known = pattern is not None or kind in (TEXT, *RECORDS, JSON, PARQUET, ARROW)
    return _find_problem(path) if is_known else "a file of another kind"


def _find_problem(path: Path) -> str | None:
    """Return the reason for which a file cannot be opened, or None."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "a pipe, socket or device"
        open(path, "rb").close()
    except FileNotFoundError:
        return "a link to nothing"
    except OSError as error:
        return f"a file that cannot be read: {error.strerror}"
    return None


def _listed_shards(folder: Path) -> list[str] | None:
    """Return the shards that a datasets folder's state.json lists, None for another state.json."""
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
    file = folder / "dataset_dict.json"
    with naming(f"{file} has no list of splits", RecursionError, TypeError, KeyError):
        splits = json.loads(file.read_bytes())["splits"]
        splits = [split for split in splits if split not in exclude]
    if len(splits) > 1:
        raise ValueError(
            f"{folder} has the splits {', '.join(splits)}: give the folders of those to read, such "
            f"as {folder / splits[0]}, or name the others in --exclude"
        )
