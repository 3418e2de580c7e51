"""Text of files that are compressed by gzip or zstd, or not at all, and packages for readers."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from typing import Any, BinaryIO

_READ = 1 << 16  # compressed bytes at once
_BUFFER = 1 << 16  # bytes of text at once
_LARGEST_WINDOW = 1 << 31  # bytes; as `zstd --long=31` writes


def import_extra(module: str, package: str, reader: str) -> Any:
    """Import a module that `reader` needs. Raises ValueError with the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{reader} needs {package}, which cannot be imported ({error}): pip install {package}, "
            "or pip install '.[data]' in the repository"
        ) from error


class BrokenFile(Exception):
    """A file that ends early, or cannot be decoded. The message has the reason."""


class _Broken(io.RawIOBase):
    """A reader of compressed bytes. It raises BrokenFile for errors of compression."""

    def __init__(self, inner: Any, errors: tuple[type[Exception], ...]):
        self._inner, self._errors = inner, errors

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._inner.readinto(buffer)
        except self._errors as error:
            raise BrokenFile(str(error)) from error


class _ZstdReader:
    """The bytes of zstd frames. Unlike zstandard's reader, it raises EOFError for half a frame."""

    def __init__(self, raw: BinaryIO, zstandard: Any):
        self._raw = raw
        self._make = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj
        self._frame: Any = None  # none between two frames
        self._compressed = self._ready = b""

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(_READ)
            if not self._compressed:
                if self._frame is None:
                    return 0
                raise EOFError("compressed file ended before the end of a zstd frame")
            self._frame = self._frame or self._make()
            self._ready = self._frame.decompress(self._compressed)
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def decompressed(raw: io.BufferedReader, by: str | None) -> io.BufferedReader:
    """Return the text in a file, compressed `by` ".gz", ".zst" or None. Damage is a BrokenFile."""
    if by is None:
        return raw
    if by == ".gz":
        errors = EOFError, zlib.error, gzip.BadGzipFile
        return io.BufferedReader(_Broken(gzip.GzipFile(fileobj=raw), errors), _BUFFER)
    zstandard = import_extra("zstandard", "zstandard", "a .zst file")
    text = _Broken(_ZstdReader(raw, zstandard), (EOFError, zstandard.ZstdError))
    return io.BufferedReader(text, _BUFFER)


def read_ahead(text: io.BufferedReader, size: int) -> tuple[bytes, str | None]:
    """Return the next `size` bytes and None, or the rest and the damage, "" at the file's end."""
    parts, length = list[bytes](), 0
    while length < size:
        try:
            part = text.read1(size - length)
        except BrokenFile as error:
            return b"".join(parts), str(error)
        if not part:
            return b"".join(parts), ""
        parts.append(part)
        length += len(part)
    return b"".join(parts), None
