"""Files at addresses such as hf://datasets/NAME/*.parquet or https://HOST/FILE, through fsspec."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from train.base.wording import naming
from train.data.compressed import import_extra

_BUFFER = 1 << 16
_WAITS = (1, 5, 25)  # seconds before a failed read is tried again
# errors of opening that remain: of addresses, packages, missing files and rights
_LASTING = (ValueError, FileNotFoundError, PermissionError)

Result = TypeVar("Result")


class _Remote(io.RawIOBase):
    """The file at an address, which is tried again. Errors are OSErrors, which are no damage."""

    def __init__(self, url: str):
        self._url, self._place = url, 0
        self._inner = _try(lambda again: _open(url), url, _LASTING)

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
            read = _try(lambda again: self._read(len(buffer), again), self._url)
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)

    def _read(self, size: int, again: bool) -> bytes:
        if again:
            self._inner = _open(self._url)
            self._inner.seek(self._place)
        return self._inner.read(size)

    def close(self) -> None:
        self._inner.close()
        super().close()


def is_remote(name: str) -> bool:
    """Whether an input is an address, and no path."""
    return "://" in name


def has_wildcards(url: str) -> bool:
    """Whether an address is a pattern of several."""
    return any(sign in url for sign in "*?[")


def open_remote(url: str) -> io.BufferedReader:
    """Open the file at an address. Raises OSError, and ValueError if a package is missing."""
    with _as_os_error():
        return io.BufferedReader(_Remote(url), _BUFFER)


def list_remote(url: str) -> list[tuple[str, int]]:
    """Return the addresses that match a pattern, sorted, with their bytes."""
    with _as_os_error(url):
        file_system, path = _find(url)
        found = file_system.glob(path) if has_wildcards(path) else [path]
        sizes = [(file_system.unstrip_protocol(x), file_system.size(x)) for x in sorted(found)]
    if not sizes:
        raise ValueError(f"no file matches {url}")
    return [(name, int(size or 0)) for name, size in sizes]


def _try(
    work: Callable[[bool], Result], url: str, lasting: tuple[type[Exception], ...] = ()
) -> Result:
    """Do `work`, and again after errors that are not `lasting`. It gets whether it failed."""
    waits, again = iter(_WAITS), False
    while True:
        try:
            return work(again)
        except Exception as error:
            if isinstance(error, lasting) or (seconds := next(waits, None)) is None:
                raise
            print(f"{url}: {error!r}; trying again", file=sys.stderr, flush=True)
            time.sleep(seconds)
            again = True


def _open(url: str) -> Any:
    file_system, path = _find(url)
    return file_system.open(path, "rb")


def _find(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    core = import_extra("fsspec.core", "fsspec", url)
    with naming(url, ImportError):  # of a package; ValueError: an unknown kind of address
        file_system, path = core.url_to_fs(url)
    return file_system, path


@contextmanager
def _as_os_error(url: str | None = None) -> Iterator[None]:
    """Make every error but ValueError an OSError that has an errno. It names the `url`, if any."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise OSError(number, f"{type(error).__name__}: {error}", url) from error
