"""Columns of text in tables: Parquet files, and the shards of Hugging Face datasets folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from train.data.compressed import BrokenFile, import_extra
from train.data.files import ARROW, Texts

_ROWS = 128  # rows that are read at once
_BUFFER = 1 << 20  # bytes of a column of Parquet
_END = b"\xff\xff\xff\xff\0\0\0\0"  # the end of a whole stream of Arrow


def read_texts(opened: BinaryIO, kind: str, field: str) -> Iterator[tuple[Texts, int]]:
    """Yield the texts of column `field`, a few rows at a time, and the place where these rows end.

    `kind` is PARQUET or ARROW. Raises BrokenFile where the file ends early or cannot be decoded,
    ValueError for a column that is missing or has no text, and OSError if it cannot be read.
    """
    pyarrow = import_pyarrow()
    read = _read_arrow if kind == ARROW else _read_parquet
    try:
        for column, place in read(pyarrow, opened, field):
            yield column.cast(pyarrow.large_binary()).to_pylist(), place
    except (OSError, pyarrow.ArrowException) as error:
        if getattr(error, "errno", None) is not None:  # an error of reading, and not pyarrow's own
            raise
        raise BrokenFile(str(error).strip()) from error


def import_pyarrow(part: str = "") -> Any:
    """Import pyarrow. Raises ValueError with the pip command if it is not installed."""
    return import_extra(f"pyarrow{part}", "pyarrow", "a .parquet file or a datasets folder")


def _read_parquet(pyarrow: Any, opened: BinaryIO, field: str) -> Iterator[tuple[Any, int]]:
    # a buffer, since a whole column of a row group would be read at once otherwise
    file = import_pyarrow(".parquet").ParquetFile(opened, buffer_size=_BUFFER, pre_buffer=False)
    path = _find_column(pyarrow, file.schema_arrow, field)
    size, done = _size(opened), 0
    for group in range(file.num_row_groups):  # since a batch would join two of them
        for batch in file.iter_batches(_ROWS, [group], [field], use_threads=False):
            done += len(batch)
            yield _take_column(batch, path), size * done // file.metadata.num_rows


def _read_arrow(pyarrow: Any, opened: BinaryIO, field: str) -> Iterator[tuple[Any, int]]:
    opened.seek(max(_size(opened) - len(_END), 0))
    if opened.read() != _END:  # pyarrow takes the end of a batch for the end of the file
        raise BrokenFile("the file ends before the end of its table")
    opened.seek(0)
    with pyarrow.ipc.open_stream(opened) as stream:
        path = _find_column(pyarrow, stream.schema, field)
        column = stream.schema.get_field_index(path[0])
    opened.seek(0)
    options = pyarrow.ipc.IpcReadOptions(included_fields=[column], use_threads=False)
    with pyarrow.ipc.open_stream(opened, options=options) as stream:
        for batch in stream:
            texts = _take_column(batch, path)
            for start in range(0, len(batch), _ROWS):
                yield texts.slice(start, _ROWS), opened.tell()


def _take_column(batch: Any, path: list[str]) -> Any:
    """Return the values of a column, or of fields in its structs: none where a struct is none."""
    column = batch.column(path[0])
    return import_pyarrow(".compute").struct_field(column, path[1:]) if path[1:] else column


def _find_column(pyarrow: Any, schema: Any, field: str) -> list[str]:
    """Return the names that lead to column `field`. Raises ValueError unless it is text."""
    # a name that has a dot itself wins
    path = [field] if field in schema.names else field.split(".")
    try:
        held = schema.field(path[0]).type
        for name in path[1:]:
            held = held.field(name).type
    except (KeyError, AttributeError) as error:
        names = ", ".join(schema.empty_table().flatten().column_names)
        raise ValueError(
            f"expected a column {field!r}, see --field; the columns are {names}"
        ) from error
    values = held.value_type if pyarrow.types.is_dictionary(held) else held
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(is_kind(values) for is_kind in is_text):
        raise ValueError(f"expected text in column {field!r}, see --field; it has {held}")
    return path


def _size(opened: BinaryIO) -> int:
    before = opened.tell()
    size = opened.seek(0, os.SEEK_END)
    opened.seek(before)
    return size
