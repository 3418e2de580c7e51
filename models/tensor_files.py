"""Tensors in files, each read when it is requested: *.safetensors, and files of torch.save.

Files of torch.save are unpickled in torch's safe mode, which makes only names and tensors.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .json_files import read_json, refuse_pointer

_SAFETENSORS = ".safetensors"
_PICKLED = (".pt", ".bin", ".pth")
# In a folder the first kind of files that exists is read: those of an index, one file, or all.
_WHOLE = {_SAFETENSORS: "model.safetensors", ".bin": "pytorch_model.bin"}
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "pytorch_model*.pt", "consolidated*.pth")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)")
# torch.load's errors for other bytes
_REFUSED = (RuntimeError, EOFError, OSError, LookupError, AttributeError, TypeError, struct.error)
_INSIDE = ("model", "module", "state_dict", "model_state_dict")  # the weights of a checkpoint
_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES = tuple(_FLOATS.values())  # dtypes that weights may have


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `dtype` is torch's name, or the file's own for others than DTYPES."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def is_file(source: str | Path) -> bool:
    """Whether `source` names a file of weights, by its ending, and not a folder."""
    path = Path(source)
    return path.suffix in (_SAFETENSORS, *_PICKLED) and not path.is_dir()


def folder_of(source: str | Path) -> Path:
    """Return the folder of the weights `source`, which is a file or that folder."""
    return Path(source).parent if is_file(source) else Path(source)


def open_file(path: Path) -> dict[str, Stored]:
    """Return the tensors in a file by name. Raises ValueError for other files, or OSError."""
    refuse_pointer(path)
    return _open_safetensors(path) if path.suffix == _SAFETENSORS else _open_pickled(path)


def open_folder(folder: Path) -> dict[str, Stored]:
    """Return the tensors in a folder by name.

    If it has a model.safetensors.index.json, they are in the files that it names. Otherwise they
    are in model.safetensors or, without that, in all *.safetensors. A folder without safetensors
    may have the same in pytorch_model*.bin, or a pytorch_model*.pt. Other files are not read.

    Raises ValueError if files are missing, damaged or have the same name twice, and for a
    model.safetensors that its index does not name.
    """
    for pattern in _PATTERNS:
        whole = _WHOLE.get(Path(pattern).suffix)
        if whole and (folder / f"{whole}.index.json").exists():
            return _read_index(folder / f"{whole}.index.json", folder / whole)
        paths = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
        if paths:
            return _merge(folder, [path for path in paths if path.name == whole] or paths)
    others = sorted(path.name for end in _PICKLED for path in folder.glob(f"*{end}"))
    found = f"; {others[0]} has another name: give it as a file" if others else ""
    raise ValueError(f"{folder} has no weights ({', '.join(_PATTERNS[:3])}){found}")


def _read_index(index: Path, whole: Path) -> dict[str, Stored]:
    """Find the tensors of an index, which names the file of each. `whole` is the file that a folder
    without an index has.
    """
    folder, ending = index.parent, whole.suffix
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no weight_map of names and files")
    for file in places.values():
        if not isinstance(file, str) or not file.endswith(ending) or file != os.path.basename(file):
            raise ValueError(f"{index} must name *{ending} in its folder, got {file!r}")
    files = sorted(set(places.values()))
    _check_sources(index, whole, files)
    held = {file: open_file(folder / file) for file in files}
    for tensor, file in places.items():
        if tensor not in held[file]:
            raise ValueError(
                f"{folder / file} does not hold {tensor}, which {index.name} places there"
            )
    for file, tensors in held.items():
        if unnamed := sorted(tensors.keys() - places.keys()):
            raise ValueError(
                f"{folder / file} holds {unnamed[:5]}, which {index.name} does not name"
            )
    return {tensor: held[file][tensor] for tensor, file in places.items()}


def _check_sources(index: Path, whole: Path, files: list[str]) -> None:
    """Raise ValueError for a whole file beside an index of others, and for missing files."""
    folder, missing = index.parent, [file for file in files if not (index.parent / file).exists()]
    is_second = whole.exists() and whole.name not in files
    if missing and is_second:
        open_file(whole)
        raise ValueError(
            f"{index} names {missing[0]}, which {folder} lacks, and not {whole.name}, which is "
            f"whole: delete {index.name} to read {whole.name}"
        )
    if missing:
        raise ValueError(f"{index} names {missing[0]}, which {folder} lacks")
    if is_second:
        raise ValueError(
            f"{folder} has two sources of weights, {whole.name} and {files[0]}, which {index.name} "
            f"names: delete {whole.name}, or {index.name} and the files that it names"
        )


def _merge(folder: Path, paths: list[Path]) -> dict[str, Stored]:
    """Find the tensors of several files that no index lists."""
    _check_count(folder, [path.name for path in paths])
    found: dict[str, Stored] = {}
    held = {path.name: open_file(path) for path in paths}
    for file, tensors in held.items():
        if twice := tensors.keys() & found.keys():
            name = min(twice)
            other = next(other for other, tensors in held.items() if name in tensors)
            raise ValueError(
                f"{other} and {file} in {folder} both hold {name}: delete one, or add a "
                f"{_WHOLE[_SAFETENSORS]}.index.json"
            )
        found |= tensors
    return found


def _check_count(folder: Path, names: list[str]) -> None:
    """Raise ValueError if a file of several is missing, by the numbers in their names."""
    found: dict[tuple[str, ...], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        stem, number, count, ending = match.groups()
        found.setdefault((stem, count, ending), set()).add(int(number))
    for (stem, count, ending), numbers in found.items():
        if len(numbers) < int(count):
            first = 0 if 0 in numbers else 1
            missing = next(i for i in itertools.count(first) if i not in numbers)
            raise ValueError(
                f"{folder} lacks {stem}-{missing:0{len(count)}}-of-{count}{ending}: expected "
                f"{int(count)} such files, got {len(numbers)}"
            )


def _open_safetensors(path: Path) -> dict[str, Stored]:
    try:
        opened = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error

    def stored(name: str) -> Stored:
        piece = opened.get_slice(name)
        shape, kind = tuple(piece.get_shape()), piece.get_dtype()
        return Stored(shape, _FLOATS.get(kind, kind), lambda: opened.get_tensor(name))

    return {name: stored(name) for name in opened.keys()}  # noqa: SIM118 - not a dict


def _open_pickled(path: Path) -> dict[str, Stored]:
    weights = _unpickle(path)
    found = weights if isinstance(weights, dict) else {"": weights}
    if inside := [key for key in _INSIDE if isinstance(found.get(key), dict)]:
        raise ValueError(
            f"{path} looks like a training checkpoint, expected names and tensors: save its "
            f"weights alone, as in torch.save(torch.load(FILE)[{inside[0]!r}], OTHER_FILE)"
        )
    if not all(_is_weight(*item) for item in found.items()):
        raise ValueError(f"{path} does not hold names and tensors of floating-point numbers")

    def stored(weight: Tensor) -> Stored:
        return Stored(tuple(weight.shape), dtype_name(weight.dtype), lambda: weight)

    return {name: stored(weight) for name, weight in found.items()}


def _unpickle(path: Path) -> Any:
    """Return the content of a file of torch.save. Tensors stay in the file where torch can do so,
    which it cannot with the format of torch 1.5 and older.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a file of weights: only names and tensors are unpickled"
        ) from error
    # bytes that are not such an archive, or only the start of one
    except _REFUSED as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a file of weights: {reason}") from error


def _is_weight(name: object, weight: object) -> bool:
    if not isinstance(name, str) or not isinstance(weight, Tensor):
        return False
    return weight.layout == torch.strided and dtype_name(weight.dtype) in DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as files have it."""
    return str(dtype).removeprefix("torch.")
