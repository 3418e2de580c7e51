"""Files of text and tokens: their kinds, and finding them in folders."""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from train.base.wording import counted
from train.data.compressed import decompressed, read_ahead
from train.data.forms import ARRAY, AUTO, LINES, OBJECT, PEEKED, PLAIN, has_only_json, recognize
from train.data.remote import open_remote

TEXT = ".txt"  # this and the next ones may also be compressed
RECORDS = (".jsonl", ".ndjson", ".jsonlines")  # a record a line
JSON = ".json"  # lines, or one array of records
PARQUET, ARROW = ".parquet", ".arrow"  # tables; .arrow only as a shard of a datasets folder
MEGATRON = ".bin"  # tokens, with their .idx beside
NO_TEXT = (PARQUET, ARROW, MEGATRON)
_COMPRESSED = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst"}
_READ = ".txt, .jsonl, .json, .parquet, datasets folder or Megatron's .bin and .idx"

Reason = tuple[str, str]  # a file that is not read, described in the singular and the plural

_EMPTY = "empty file", "empty files"
_NAMED_BEFORE = "other name of a file that is read once", "other names of files that are read once"
_FOLDER_LINK = "link to a folder", "links to folders"
_HIDDEN_FOLDER = "hidden folder", "hidden folders"
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
METADATA = "hidden file or metadata", "hidden files or metadata"
_ONE_OBJECT = (
    "JSON file of one object over several lines (jq -c . writes it on one)",
    "JSON files of one object over several lines (jq -c . writes each on one)",
)
# files that describe data or models beside them
_DESCRIPTIONS = re.compile(
    r"(state|dataset_infos?|dataset_dict|metadata|manifest|index|croissant|(generation_|tokenizer_)?"
    r"config|tokenizer|special_tokens_map|.*\.index)\.json"
    r"|(checksums?|(md5|sha\d+)(sums?)?)(\.(txt|json))?",
    re.IGNORECASE,
)
_NOT_LISTED = "arrow file that no state.json lists", "arrow files that no state.json lists"


class Unread:
    """Files that were found but not read: their number for each reason, and the first one of
    each.
    """

    def __init__(self):
        self._first: dict[Reason, Path | str] = {}
        self._count: dict[Reason, int] = {}

    def add(self, reason: Reason, path: Path | str) -> None:
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
    form  LINES, ARRAY or PLAIN. None for tables and tokens, and until `find_form` looks
    """

    path: Path
    name: str
    url: str | None = None
    form: str | None = None

    @staticmethod
    def found(path: Path, source: Path) -> TextFile:
        """Return the file at `path`, which was found in the input `source` or is that input."""
        return TextFile(path, path.name if path == source else path.relative_to(source).as_posix())

    @staticmethod
    def remote(url: str) -> TextFile:
        """Return the file at an address."""
        path = Path(urlsplit(url).path)
        return TextFile(path, path.name, url)

    def in_form(self, asked: str) -> TextFile:
        """Return the file in the form that --format names, unless it is AUTO or this is no text."""
        if asked == AUTO or self.kind in NO_TEXT:
            return self
        return replace(self, form=asked)

    def __str__(self) -> str:
        return self.url or str(self.path)

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @property
    def compression(self) -> str | None:
        return compression(self.path)

    @property
    def has_records(self) -> bool:
        """Whether the file has a known form with records of JSON."""
        return self.form in (LINES, ARRAY)

    def open(self) -> io.BufferedReader:
        """Open the file. Raises OSError if it cannot be read."""
        return open_remote(self.url) if self.url else open(self.path, "rb")


def compression(path: Path) -> str | None:
    """Return ".gz" or ".zst" for a compressed file, else None."""
    return _COMPRESSED.get(path.suffix.lower())


def kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case. For a compressed file, it is the one before .gz or
    .zst. Files that are not PARQUET, ARROW or MEGATRON are read as text, in a form of forms.py.
    """
    return Path(path.stem if compression(path) else path.name).suffix.lower()


@contextmanager
def named(file: TextFile) -> Iterator[None]:
    """Make errors name the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


class NotInLines(ValueError):
    """A file with a JSON object over several lines, where records are expected."""


def find_form(file: TextFile, raw: io.BufferedReader) -> TextFile:
    """Return a file of text in the form of its content. `raw` is the open file, at its start.

    Raises NotInLines for a JSON object over several lines, and ValueError for a .txt with JSON.
    """
    if file.form:
        return file
    start, end = read_ahead(decompressed(raw, file.compression), PEEKED)
    raw.seek(0)
    form = recognize(start, whole=end is not None, by_line=file.kind in RECORDS)
    named_json = file.kind in (*RECORDS, JSON)
    if form in (ARRAY, OBJECT) and not named_json and not has_only_json(start):
        form = PLAIN  # code, for example
    if file.kind == TEXT and form != PLAIN:
        held = {LINES: "lines of JSON", ARRAY: "a JSON array", OBJECT: "a JSON object"}[form]
        records = "" if form == OBJECT else f"--format {form} reads its records, and "
        raise ValueError(
            f"expected plain text in a .txt, got {held}: {records}--format {PLAIN} reads it as it "
            "is. In a folder, --exclude leaves it out"
        )
    if form == OBJECT:
        raise NotInLines(
            "expected a JSON record a line, or one JSON array of records, got an object over "
            f"several lines: `jq -c . {file} > NEW.jsonl` writes an object a line, and `jq -c "
            f"'.NAME[]'` the records of a list in it. --format {PLAIN} reads it as plain text"
        )
    if form == PLAIN and named_json:
        form = LINES  # which are bad
    return replace(file, form=form)


def find_files(
    inputs: list[str], pattern: str | None, exclude: list[str], asked: str = AUTO
) -> tuple[list[TextFile], Unread]:
    """Return the files that `inputs` name, and the files that were found but are not read. Files of
    text get the form `asked`, or by AUTO the one of their content.

    Folders are searched for names that match `pattern` (default: all kinds of files that are read,
    in either case). Files are sorted within a folder. A file that is named several times is read
    once. Links to files are followed. Links to folders are followed only if they are an input
    themselves. Of a Hugging Face datasets folder, the shards that its state.json lists are read. An
    input may be Megatron's prefix, without .bin or .idx. Hidden files of a folder, and files that
    describe others, are read only if `pattern` is their name.

    Raises ValueError for an input that is "", does not exist, cannot be opened, or has an unknown
    suffix and plain text. Also raises it for a folder without any match, for missing shards, for a
    folder of several splits, and as `find_form`.
    """
    if "" in inputs:
        raise ValueError('--input must not be ""; the current folder is .')
    files: list[TextFile] = []
    unread, seen = Unread(), set()
    for path in map(_file_of_tokens, map(Path, inputs)):
        for file in _search(path, pattern, exclude, unread):
            status = file.stat()
            if (status.st_dev, status.st_ino) in seen:
                unread.add(_NAMED_BEFORE, file)
            elif not status.st_size:
                unread.add(_EMPTY, file)
            elif text := _open_form(TextFile.found(file, path), asked, file != path, pattern):
                files.append(text)
            else:
                unread.add(_ONE_OBJECT, file)
                continue  # it is refused if it is an input itself
            seen.add((status.st_dev, status.st_ino))
    if not files:
        raise ValueError(f"there is no text to read: {'; '.join(unread.lines())}")
    return files, unread


def _search(path: Path, pattern: str | None, exclude: list[str], unread: Unread) -> list[Path]:
    """Return the file that an input is, or the files of a folder. Raises ValueError if there is
    none, or it cannot be read. `unread` gets the other files of the folder.
    """
    if not path.is_dir():
        _check_named(path)
        return [path]
    found, others = _search_folder(path, pattern, exclude)
    for other, reason in others:
        unread.add(reason, other)
    if not found:
        reasons = "; ".join(unread.lines()) or "it is empty"
        raise ValueError(f"folder {path} has no file that matches {pattern or _READ}: {reasons}")
    return found


def check_holds_text(files: Sequence[TextFile], reader: str) -> None:
    """Raise ValueError for a file that `reader` cannot read: tables and tokens."""
    for file in files:
        if file.kind in NO_TEXT:
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
    if problem := _find_problem(path):
        raise ValueError(f"{path} is not read: it is a {problem[0]}")


def _open_form(file: TextFile, asked: str, in_folder: bool, pattern: str | None) -> TextFile | None:
    """Return the file with its form. Return None for a .json of one object over several lines that
    only its folder names: it may describe the files beside it.

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
        others += [(here / name, _HIDDEN_FOLDER) for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        others += [(here / name, _FOLDER_LINK) for name in folders if (here / name).is_symlink()]
        if "dataset_dict.json" in names:
            _check_splits(here, exclude)
        names = [name for name in names if name not in exclude]
        shards = _listed_shards(here) if "state.json" in names else None
        for path in (here / name for name in names if not _is_companion(here / name, shards)):
            if pattern and not path.absolute().match(pattern):
                why = f"file that does not match {pattern}", f"files that do not match {pattern}"
                others.append((path, why))
            elif is_metadata(path) and path.name != Path(pattern or "").name:
                others.append((path, METADATA))
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
    return None if matched or kind in (TEXT, *RECORDS, JSON, PARQUET) else _OTHER_KIND


def is_metadata(path: Path) -> bool:
    """Whether a file is hidden, or describes other files by its name."""
    name = Path(path.stem if compression(path) else path.name).name
    return name.startswith(".") or bool(_DESCRIPTIONS.fullmatch(name))


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
