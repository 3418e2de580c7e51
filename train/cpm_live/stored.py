"""Instances in a folder: written once from start to end, and read one by one. No torch, because
data is prepared without it.

tokens.bin, documents.bin, tokenizer.*, index.json   as in train/data/token_file.py; a document is
                                                     an instance. "instances" in the index is the
                                                     kind of model
subs.bin                                             uint16, the sub-id of each token
segments.bin                                         (N, 4) int32, see instances.Field
segment_starts.bin                                   int64, the first segment of each instance
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from train.base.folders import inside
from train.cpm_live.instances import COLUMNS, Instance
from train.data.stored import DataWriter, HashedFile, StoredNumbers
from train.data.tokenizer_base import Tokenizer

_SUBS, _SEGMENTS, _STARTS = np.dtype(np.uint16), np.dtype(np.int32), np.dtype(np.int64)
_COPIED = 1 << 20  # tokens or segments at once


class InstanceWriter(DataWriter[Instance]):
    """Writes one folder of instances."""

    unit, fewest = "instances", (1, 1)

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        super().__init__(folder, tokenizer)
        names = {"subs.bin", "segments.bin", "segment_starts.bin"}
        self._more = {name: HashedFile(folder / name) for name in sorted(names)}
        self.segments = 0

    def write(self, document: Iterable[Instance]) -> None:
        [instance] = document
        if len(instance):
            self._extend(instance.tokens, instance.subs)
            self._end(instance.segments)

    def copy(self, other: DataWriter[Instance], start: int, end: int) -> None:
        file = InstanceFiles(other.folder, other.tokenizer.dtype)
        for number, tokens in enumerate(file.lengths[start:end].tolist(), start):
            for at in range(0, tokens, _COPIED):
                piece = file.instance(number, slice(at, at + _COPIED))
                self._extend(piece.tokens, piece.subs)
            self._end(piece.segments)

    def close(self) -> dict[str, str]:
        return super().close() | {name: file.close() for name, file in self._more.items()}

    def _notes(self) -> dict[str, Any]:
        return {"instances": self.tokenizer.instances, "segments": self.segments}

    def _extend(self, tokens: Sequence[int] | np.ndarray, subs: Sequence[int] | np.ndarray) -> None:
        self._append(tokens)
        self._more["subs.bin"].write(np.asarray(subs, dtype=_SUBS).tobytes())

    def _end(self, segments: np.ndarray) -> None:
        """End an instance, given the segments of its tokens."""
        self._note_documents(np.array([self.tokens - segments[:, COLUMNS.tokens].sum()]))
        self._more["segments.bin"].write(segments.astype(_SEGMENTS).tobytes())
        self._more["segment_starts.bin"].write(np.array([self.segments], dtype=_STARTS).tobytes())
        self.segments += len(segments)


class AntWriter(InstanceWriter):
    """Puts `<s>` before and `</s>` after a text that may arrive in parts."""

    def write(self, document: Iterable[Instance]) -> None:
        """Append an instance, given in parts. Raises ValueError for 2^31 tokens or more."""
        start = self.tokens
        for piece in document:
            if len(piece) and self.tokens == start:
                self._extend([self.tokenizer.bos_id], [0])
            self._extend(piece.tokens, piece.subs)
        if self.tokens == start:
            return
        self._extend([self.tokenizer.eos_id], [0])
        segments = piece.segments.astype(np.int64)
        segments[0, COLUMNS.tokens] = tokens = self.tokens - start
        if tokens > np.iinfo(_SEGMENTS).max:
            raise ValueError(
                f"expected fewer than 2^31 tokens in a text, got {tokens:,}: cut it into several"
            )
        self._end(segments)


class InstanceFiles:
    """The numbers in a folder of instances, without its index."""

    def __init__(self, folder: Path, dtype: np.dtype):
        files = {
            "tokens": dtype,
            "documents": _STARTS,
            "subs": _SUBS,
            "segments": _SEGMENTS,
            "segment_starts": _STARTS,
        }
        opened = {
            name: StoredNumbers(inside(folder, f"{name}.bin"), of) for name, of in files.items()
        }
        self._folder, self._tokens = folder, opened["tokens"]
        self._subs, self._segments = opened["subs"], opened["segments"]
        self.starts = np.append(opened["documents"][:], len(self._tokens))
        stop = len(self._segments) // len(COLUMNS)
        self._segment_starts = np.append(opened["segment_starts"][:], stop)
        counts = [len(self._segment_starts), len(self.starts)], [len(self._subs), len(self._tokens)]
        if any(a != b for a, b in counts) or (np.diff(self._segment_starts) <= 0).any():
            raise ValueError(f"{folder} has files of instances that do not match: {counts}")

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @cached_property
    def kinds(self) -> np.ndarray:
        """The sum of each instance's kinds of segments: a Bee's texts to predict, an Ant's type."""
        width = len(COLUMNS)
        bounds = range(0, len(self._segments), _COPIED * width)
        kinds = [
            self._segments[at : at + _COPIED * width][COLUMNS.kind :: width].copy() for at in bounds
        ]
        return np.add.reduceat(np.concatenate(kinds), self._segment_starts[:-1], dtype=np.int64)

    def instance(self, number: int, part: slice = slice(None)) -> Instance:
        """Return an instance, with `part` of its tokens. Raises ValueError for wrong segments."""
        start, stop = map(int, self.starts[number : number + 2])
        first, last = map(int, self._segment_starts[number : number + 2])
        width = len(COLUMNS)
        segments = self._segments[width * first : width * last].reshape(-1, width)
        lengths, parents = segments[:, COLUMNS.tokens], segments[:, COLUMNS.parent]
        if (
            (lengths <= 0).any()
            or lengths.sum() != stop - start
            or (parents >= np.arange(len(segments))).any()
        ):
            raise ValueError(
                f"{self._folder}: the segments of instance {number} do not match its tokens"
            )
        within, to, _ = part.indices(stop - start)
        tokens, subs = (
            numbers[start + within : start + to] for numbers in (self._tokens, self._subs)
        )
        return Instance(tokens.astype(np.int64), subs.astype(np.int64), segments)
