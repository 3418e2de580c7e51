"""Files at addresses such as hf://datasets/NAME/*.parquet or https://HOST/FILE, through fsspec."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from train.data.extras import import_extra

_BUFFER = 1 << 16
_WAITS = (1, 5, 25)  # seconds before a failed read is tried again


class _Remote(io.RawIOBase):
    """The file at an address. A read that fails is tried again.

    Errors of reading, which may be of any kind, are OSErrors that have an errno. So they are never
    taken for damage to the file.
    """

    def __init__(self, url: str):
        self._url, self._place, self._inner = url, 0, _open(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        with _as_os_error():
            self._place = int(self._inner.seek(place, whence))
        return self._place

    def readinto(self, buffer: Any) -> int:
        with _as_os_error():
            read = self._read_patiently(len(buffer))
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)

    def _read_patiently(self, size: int) -> bytes:
        waits, inner = iter(_WAITS), self._inner
        while True:
            try:
                if inner is None:
                    inner = self._inner = _open(self._url)
                    inner.seek(self._place)
                read: bytes = inner.read(size)
                return read
            except Exception as error:
                if (seconds := next(waits, None)) is None:
                    raise
                print(f"{self._url}: {error!r}; trying again", file=sys.stderr, flush=True)
                time.sleep(seconds)
                inner = None

    def close(self) -> None:
        self._inner.close()
        super().close()


def is_remote(name: str) -> bool:
    """Whether an input is an address, and no path."""
    return "://" in name


def open_remote(url: str) -> BinaryIO:
    """Open the file at an address. Raises OSError if it cannot be read, and ValueError if a package
    for such addresses is missing.
    """
    with _as_os_error():
        return io.BufferedReader(_Remote(url), _BUFFER)


def list_remote(url: str) -> list[tuple[str, int]]:
    """Return the addresses that match a pattern, sorted, with their sizes in bytes. Raises
    ValueError if there is none, or as `open_remote`.
    """
    with _as_os_error():
        file_system, path = _find(url)
        found = file_system.glob(path) if any(c in path for c in "*?[") else [path]
        sizes = [(file_system.unstrip_protocol(x), file_system.size(x)) for x in sorted(found)]
    if not sizes:
        raise ValueError(f"no file matches {url}")
    return [(name, int(size or 0)) for name, size in sizes]


def _open(url: str) -> Any:
    file_system, path = _find(url)
    return file_system.open(path, "rb")


def _find(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    core = import_extra("fsspec.core", "fsspec", url)
    try:
        file_system, path = core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # of a package, or of an unknown kind of address
        raise ValueError(f"{url}: {error}") from error
    return file_system, path


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Make every error but ValueError an OSError that has an errno."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(number, f"{type(error).__name__}: {error}") from error
