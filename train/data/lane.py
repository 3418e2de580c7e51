"""One lane of a stream: rows from some of its files, tokenized while a thread reads them ahead.

Documents are shuffled inside blocks: consecutive parts of files, up to a number of tokens. A block
follows from the place at which it starts. So that place and a token in the block are all that a
checkpoint must store, and the shuffled documents are read again when a run resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from train.base.wording import counted
from train.data.files import Piece
from train.data.folder import Row, make_row
from train.data.records import BadLines, check_broken
from train.data.stream_files import StreamFiles
from train.data.text import Encoded, Encoder, read_pieces


@dataclass(frozen=True, order=True)
class Place:
    """The start of a part of a file: after so many epochs, in so many files, at a line from 1."""

    epoch: int = 0
    file: int = 0
    line: int = 1


@dataclass(frozen=True)
class Block:
    """Documents of consecutive parts of files, in random order, up to the `end`, a place.

    tokens  all documents, one after the other: (T,)
    starts  the places where documents start: rising, int64
    """

    end: Place
    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Damage:
    """The reason of the damage to a file, and the number of `whole` lines before it, after which
    nothing is read even if the file is repaired, so that a resumed run has the same rows.
    """

    whole: int
    reason: str


class BrokenFiles:
    """The broken files of a stream that are known, by number. `announce` is for the log."""

    def __init__(self, stream: StreamFiles, announce: Callable[[str], None]):
        self.found: dict[int, Damage] = {}
        self._stream, self.announce = stream, announce

    def add(self, number: int, damage: Damage) -> None:
        """Announce a broken file. Raises ValueError if there are too many."""
        self.found[number] = damage
        self.announce(f"the rest of a broken shard is skipped: {self._describe(number)}")
        self.check()

    def check(self) -> None:
        """Raise ValueError if there are too many broken files."""
        check_broken([*map(self._describe, sorted(self.found))], self._stream.max_bad_shards)

    def _describe(self, number: int) -> str:
        file, _ = self._stream.files[number]
        return f"{file}: {self.found[number].reason}"


class BlockReader:
    """Reads the blocks of lane `number` of `lanes`. Token `bos`, if any, begins documents."""

    def __init__(
        self,
        stream: StreamFiles,
        encoder: Encoder,
        number: int,
        lanes: int,
        seed: int,
        bos: int | None,
        broken: BrokenFiles,
    ):
        files = enumerate(file for file, _ in stream.files)
        self._files = {i: file for i, file in files if i % lanes == number}
        self._block_tokens = -(-stream.shuffle_tokens // lanes)
        self._stream, self._encoder, self._broken = stream, encoder, broken
        self._seed, self._bos = (seed, number), bos
        self._bad = BadLines()
        self._place: Place | None = None  # where `_parts` continues
        self._parts: Iterator[tuple[Encoded | None, Place]] = iter(())

    def read(self, start: Place) -> Block:
        """Return the block that starts at a place, and ends with the epoch at the latest, or raise
        ValueError for files that cannot be read, too many bad lines, and an epoch without text.
        """
        if self._place != start:
            self._parts = self._read_parts(start)
        documents: list[np.ndarray] = []
        bad, tokens, end = BadLines(), 0, start
        while tokens < self._block_tokens and end.epoch == start.epoch:
            encoded, end = next(self._parts)
            if encoded is not None:
                bad.extend(encoded.bad)
                documents += [self._complete(ids) for _, ids in encoded.documents if len(ids)]
                tokens = sum(map(len, documents))
        if bad.count:
            skipped = counted(bad.count, "bad line was skipped", "bad lines were skipped")
            self._broken.announce(f"{skipped}, the first: {bad.first[0]}")
        self._bad.extend(bad)
        self._bad.check(self._stream.max_bad)
        self._place = end
        return self._shuffle(start, end, documents)

    def _shuffle(self, start: Place, end: Place, documents: Sequence[np.ndarray]) -> Block:
        chance = np.random.default_rng((*self._seed, 1, start.epoch, start.file, start.line))
        documents = [documents[i] for i in chance.permutation(len(documents))]
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.empty(0, np.int64)
        return Block(end, tokens, np.cumsum(lengths) - lengths)

    def _complete(self, ids: Any) -> np.ndarray:
        """Return a document with its begin token and its end-of-text token."""
        begin = [] if self._bos is None or ids[0] == self._bos else [self._bos]
        return np.concatenate([begin, ids, [self._encoder.tokenizer.eos_id]]).astype(ids.dtype)

    def _read_parts(self, start: Place) -> Iterator[tuple[Encoded | None, Place]]:
        """Yield the parts from a place on with the place after each, and None at an epoch's end."""
        place, epoch_has_text = start, start > Place(start.epoch)
        while True:
            chance = np.random.default_rng((*self._seed, 0, place.epoch))
            order = [list(self._files)[i] for i in chance.permutation(len(self._files))]
            for number in order[place.file :]:
                for piece in self._read_file(number, place.line):
                    encoded = self._encoder(piece)
                    epoch_has_text |= any(len(ids) for _, ids in encoded.documents)
                    place = replace(place, line=piece.first_line + len(piece.lines))
                    yield encoded, place
                place = Place(place.epoch, place.file + 1)
            if not epoch_has_text:
                raise ValueError(f"there is no text in {', '.join(map(str, self._files.values()))}")
            place, epoch_has_text = Place(place.epoch + 1), False
            yield None, place

    def _read_file(self, number: int, line: int) -> Iterator[Piece]:
        """Yield the parts of a file from a line on, up to known damage."""
        known = self._broken.found.get(number)
        for piece in read_pieces(self._files[number], self._stream.field):
            lines = len(piece.lines) if known is None else known.whole - piece.first_line + 1
            if piece.damage and known is None:
                self._broken.add(number, Damage(piece.first_line + lines - 1, piece.damage))
            if piece.first_line >= line and lines > 0:
                yield replace(piece, lines=piece.lines[:lines])
            if lines < len(piece.lines):
                return


class Lane:
    """The rows of one lane, in order. `rows` were taken or skipped."""

    def __init__(
        self, reader: BlockReader, thread: Executor, seq_len: int, documents: bool, state: dict
    ):
        self._reader, self._thread = reader, thread
        self._seq_len, self._documents = seq_len, documents
        self.rows, self._token = state["rows"], state["token"]
        self._place = Place(*(state[name] for name in ("epoch", "file", "line")))
        self._blocks: deque[Block] = deque()  # the first one starts at `_place`
        self._next: Future[Block] | None = None

    @staticmethod
    def new_state() -> dict[str, int]:
        return {"rows": 0, **asdict(Place()), "token": 0}

    def state(self) -> dict[str, int]:
        """Return the state in which the lane continues: values of JSON."""
        return {"rows": self.rows, **asdict(self._place), "token": self._token}

    @property
    def epoch(self) -> int:
        """The number of times that all files were read before the next row."""
        return self._place.epoch

    def skip(self, rows: int) -> None:
        assert rows >= 0
        self.rows += rows
        self._token += rows * self._seq_len
        while self._token and (not self._blocks or self._token >= len(self._blocks[0].tokens)):
            if not self._blocks:
                self._append_block()
                continue
            first = self._blocks.popleft()
            self._token -= len(first.tokens)
            self._place = first.end

    def take(self) -> Row:
        """Return the next row: its tokens, and the token after them, which is the last target."""
        window, starts, filled = [], [], 0
        token, needed, number = self._token, self._seq_len + 1, 0
        while filled < needed:
            if number == len(self._blocks):
                self._append_block()
            block = self._blocks[number]
            part = block.tokens[token : token + needed - filled]
            first, last = np.searchsorted(block.starts, (token, token + len(part)))
            starts.append(block.starts[first:last] - token + filled)
            window.append(part.astype(np.int64))
            filled, token, number = filled + len(part), 0, number + 1
        row_starts = np.concatenate(starts)
        kept = row_starts[row_starts > 0] if self._documents else None
        row = make_row(np.concatenate(window), kept, self._seq_len)
        self.skip(1)
        return row

    def _append_block(self) -> None:
        """Wait for the next block, and let the thread read the one after it."""
        start = self._blocks[-1].end if self._blocks else self._place
        following = self._next or self._thread.submit(self._reader.read, start)
        block = following.result()
        self._next = self._thread.submit(self._reader.read, block.end)
        self._blocks.append(block)
