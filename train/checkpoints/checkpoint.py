"""Checkpoints: folders step_NNNNNNNN, which are complete or do not exist (docs/checkpoints.md).

A save writes into a hidden folder, syncs every file, writes the manifest last, and renames the
folder at the end. So a kill at any moment leaves earlier checkpoints unchanged. Shards are ranges
of flattened tensors, so any number of ranks can read them. No file may lie outside its folder.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from train.base import ranks
from train.base.files import hash_file
from train.base.folders import inside
from train.base.wording import counted
from train.checkpoints.rank_file import RNG
from train.data.tokenizer import Tokenizer
from train.engine import Shard

TOKENIZER = "tokenizer"  # the folder in a checkpoint; for older checkpoints, beside them
_ROOM = 1.05  # free space for the next checkpoint, relative to the size of the last one
_NAME = re.compile(r"step_\d{8,}")
_FORMAT = 1  # of checkpoints, in their manifests
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class CheckpointError(ranks.RankError):
    """A checkpoint could not be written or read. The message has the reason."""


def check_finite(root: Path, state: dict[str, Any], shards: dict[str, Shard]) -> None:
    """Raise CheckpointError on every rank if any weight or optimizer state is not finite."""
    final = folder(root, state["step"])
    with _refusing(final):
        ranks.together(lambda: _check_finite(shards), CheckpointError)


def write(
    root: Path,
    state: dict[str, Any],
    write_file: Callable[[Path], dict[str, Any]],
    keep_last: int | None,
    tokenizer: Tokenizer | None = None,
    group: ranks.Group = None,
) -> Path:
    """Write the checkpoint of state["step"] under `root`, and keep the newest `keep_last`, or all.

    write_file  writes the file of this rank's shards, and returns its manifest entry
    group       all ranks, for a thread

    Every rank must call this. Raises CheckpointError on every rank if any rank could not write.
    """
    final = folder(root, state["step"])
    partial = root / f".{final.name}.partial"
    file = partial / f"rank_{ranks.rank():05d}.safetensors"
    with _refusing(final, partial):
        ranks.on_first(lambda: _prepare(partial, keep_last), CheckpointError, group)
        entry = ranks.together(lambda: write_file(file), CheckpointError, group)
        files = dict(ranks.gather((file.name, entry), group))
        if tokenizer:
            ranks.on_first(
                lambda: files.update(_write_tokenizer(partial, tokenizer)), CheckpointError, group
            )
        ranks.on_first(
            lambda: _finish(partial, final, state, files, keep_last), CheckpointError, group
        )
    return final


@contextmanager
def _refusing(final: Path, partial: Path | None = None) -> Iterator[None]:
    """Make errors name the checkpoint that could not be saved. Remove what was written of it."""
    try:
        yield
    except CheckpointError as error:
        if ranks.rank() == 0 and partial:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        raise CheckpointError(f"could not save {final}: {error}") from error


def folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def outlook(root: Path) -> str:
    """Return the newest good checkpoint of a run that ends, and how to resume from it. A checkpoint
    is good if it was not saved while steps were skipped. Print damaged ones to stderr.
    """
    readable = list(_readable(root))
    good = next((path for path, skips in readable if not skips), None)
    if good is None:
        return "there is no good checkpoint"
    again = "run the same command with --resume auto"
    how = again if good == readable[0][0] else f"give --resume {good} and another --output"
    return f"the last good checkpoint is {good}; to resume from it, {how}"


def _readable(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield checkpoints, the newest first, with the number of steps skipped just before each."""
    for path in listed(root):
        try:
            yield path, Checkpoint(path).state.get("skips_in_a_row", 0)
        except CheckpointError as error:
            _print_damage(path, str(error))


def newest(root: Path, set_aside: bool = False) -> Path | None:
    """Return the newest whole checkpoint, or None, on every rank. Print damaged ones to stderr.
    With `set_aside`, rename newer ones to `step_....damaged`. If all are damaged, it raises.
    """
    damaged = []
    for path in listed(root):
        problem = _damage_on_any_rank(path)
        if problem:
            damaged.append(path)
            _print_damage(path, problem)
            continue
        if set_aside:
            ranks.on_first(lambda: _set_aside(damaged), CheckpointError)
        return path
    if damaged:
        raise CheckpointError(f"every checkpoint in {root} is damaged")
    return None


def find(run_or_checkpoint: Path) -> Path:
    """Return the checkpoint at a path, or the newest whole one in it, or raise CheckpointError."""
    run_or_checkpoint = _resolve_link(run_or_checkpoint)
    if not _is_checkpoint(run_or_checkpoint):
        path = newest(run_or_checkpoint)
        if path is None:
            raise CheckpointError(f"there is no checkpoint in {run_or_checkpoint}")
        return path
    if problem := _damage_on_any_rank(run_or_checkpoint):
        raise CheckpointError(f"{run_or_checkpoint} is not a whole checkpoint: {problem}")
    return run_or_checkpoint


def peek(run_or_checkpoint: Path) -> tuple[Path, Any] | None:
    """Return the checkpoint of a path as `find` does, and its state, without reading anything else.
    Return None for a run without a checkpoint. Raises CheckpointError if none is readable.
    """
    place = _resolve_link(run_or_checkpoint)
    paths = [place] if _is_checkpoint(place) else listed(place)
    for path in paths:
        try:
            return path, _read_state(path)
        except CheckpointError:
            if path == paths[-1]:
                raise
    return None


def _resolve_link(path: Path) -> Path:
    return path.resolve() if path.is_symlink() else path


def _is_checkpoint(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) or (path / "manifest.json").exists()


def _read_state(path: Path) -> Any:
    """Return the state of a checkpoint. Raises CheckpointError if its manifest or it is damaged."""
    try:
        _manifest(path)
        found = json.loads((path / "manifest.json").read_text())["format"]
        if found != _FORMAT:  # a newer version may have written it, and it may be whole
            raise ValueError(f"expected a manifest of format {_FORMAT}, got {found!r}")
        return json.loads((path / "state.json").read_text())
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error


def damage(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Describe the damage of a checkpoint, or return None. Hash only every parts-th file."""
    try:
        for name, expected in sorted(_manifest(path).items())[part::parts]:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {counted(size, 'byte')}, expected {expected['bytes']:,}"
            if hash_file(path / name) != expected["sha256"]:
                return f"{name} does not have the sha256 of its manifest"
    except _UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return a checkpoint's files. Raises ValueError if some are missing or outside its folder."""
    _check_inside(path, "manifest.json")
    files = json.loads((path / "manifest.json").read_text())["files"]
    if not {"state.json", "rank_00000.safetensors"} <= files.keys():
        raise ValueError(f"its manifest names only {sorted(files)}")
    for name in files:
        _check_inside(path, name)
    return files


def _check_inside(path: Path, name: str) -> None:
    """Raise ValueError unless `name` is a file under `path`."""
    for part in name.split("/"):
        path = inside(path, part)
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is not a file")


class Checkpoint:
    """A reader of a whole checkpoint. Raises CheckpointError if a part that is read is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.state = _read_state(path)
        try:
            names = sorted(_manifest(path))
            self._files = [
                safe_open(path / name, "pt") for name in names if name.startswith("rank_")
            ]
        except (*_UNREADABLE, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
        # key -> (start, stop, slice)
        self._pieces: dict[str, list[tuple[int, int, Any]]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files:
            for key, (start, shape) in json.loads(file.metadata()["shards"]).items():
                piece = file.get_slice(key)
                self._pieces[key].append((start, start + piece.get_shape()[0], piece))
                self.shapes[key] = tuple(shape)

    def read(self, key: str, shard: Shard) -> Tensor:
        """Return the entries of `shard`, flat, from the files of any ranks."""
        if self.shapes.get(key) != shard.shape:
            raise CheckpointError(
                f"{self.path}: expected {key} of shape {shard.shape}, got {self.shapes.get(key)}"
            )
        return self._read_range(key, shard.start, shard.start + shard.flat.numel())

    def weights(self) -> dict[str, Tensor]:
        """Return all weights, whole."""
        return {
            key.removeprefix("weight/"): self._read_range(key, 0, math.prod(shape)).view(shape)
            for key, shape in self.shapes.items()
            if key.startswith("weight/")
        }

    def restore_rng(self, rank: int) -> None:
        """Restore the RNG state of rank `rank`, if there was such a rank."""
        if rank < len(self._files):
            torch.set_rng_state(self._files[rank].get_tensor(RNG))

    def _read_range(self, key: str, start: int, stop: int) -> Tensor:
        parts, at = [], start
        for first, last, piece in sorted(self._pieces[key], key=lambda p: p[:2]):
            if at < stop and first <= at < last:
                parts.append(piece[at - first : min(last, stop) - first])
                at = min(last, stop)
        if at < stop:
            raise CheckpointError(f"{self.path}: entries of {key} are missing from {at} on")
        return torch.cat(parts) if parts else torch.empty(0)


def listed(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, the newest first."""
    found = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _damage_on_any_rank(path: Path) -> str | None:
    """Describe the damage of a checkpoint. The ranks share the work of hashing it."""
    problems = ranks.gather(damage(path, ranks.rank(), ranks.world_size()))
    return next(filter(None, problems), None)


def _print_damage(path: Path, problem: str) -> None:
    ranks.warn(f"checkpoint {path} is damaged: {problem}")


def _set_aside(damaged: list[Path]) -> None:
    for path in damaged:
        numbered = (path.with_name(f"{path.name}.damaged.{n}") for n in itertools.count(2))
        names = itertools.chain([path.with_name(f"{path.name}.damaged")], numbered)
        path.rename(next(name for name in names if not name.exists()))


def _prepare(partial: Path, keep_last: int | None) -> None:
    root = partial.parent
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".step_*"):
        _erase(leftover)
    if keep_last:
        _make_room(root, keep_last)
    partial.mkdir()


def _make_room(root: Path, keep_last: int) -> None:
    """Remove old checkpoints if the next would not fit, but never the newest good and whole one."""
    there = listed(root)
    wanted = _ROOM * max((count_bytes(path) for path in there[:1]), default=0)
    if shutil.disk_usage(root).free >= wanted:
        return
    good = next((path for path, skips in _readable(root) if not skips and not damage(path)), None)
    for old in reversed(there[max(keep_last - 1, 0) :]):
        if old != good and shutil.disk_usage(root).free < wanted:
            print(
                f"{root} has no room for another checkpoint: removing {old} first", file=sys.stderr
            )
            _remove(old)


def count_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _check_finite(shards: dict[str, Shard]) -> None:
    for key, shard in shards.items():
        # aminmax makes no copy
        if shard.flat.numel() and not torch.stack(shard.flat.aminmax()).isfinite().all():
            raise ValueError(f"{key} is not finite, which a smaller --lr may prevent")


def _write_tokenizer(partial: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the tokenizer. Return the manifest entries of its files."""
    folder = partial / TOKENIZER
    tokenizer.save(folder)
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    for place in (*written, folder):
        _sync(place)
    return {file.relative_to(partial).as_posix(): _describe_file(file) for file in written}


def _finish(
    partial: Path, final: Path, state: dict[str, Any], files: dict[str, Any], keep_last: int | None
) -> None:
    files["state.json"] = _write_json(partial / "state.json", state)
    manifest = {"format": _FORMAT, "step": state["step"], "files": files}
    _write_json(partial / "manifest.json", manifest)
    _sync(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    _sync(final.parent)
    for old in listed(final.parent)[keep_last:] if keep_last else []:
        _remove(old)


def _write_json(file: Path, value: Any) -> dict[str, Any]:
    file.write_text(json.dumps(value, indent=1) + "\n")
    _sync(file)
    return _describe_file(file)


def _remove(path: Path) -> None:
    """Remove a checkpoint such that it is never seen in part."""
    hidden = path.with_name(f".{path.name}.trash")
    path.rename(hidden)
    _erase(hidden)


def _erase(path: Path) -> None:
    """Remove a folder, or a link to one."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _describe_file(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": hash_file(file)}


def _sync(path: Path) -> None:
    """Make the content of a file or folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
