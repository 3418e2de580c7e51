"""Streams: text that pretrain.py reads and tokenizes while it trains (stream_files.py).

Files are dealt to lanes, and so are a batch's samples: consecutive samples are rows of one lane. So
rows do not depend on the number of ranks, which read only the lanes of their own samples.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from train.base import ranks
from train.base.wording import counted
from train.data.batches import Settings
from train.data.folder import Row
from train.data.lane import BlockReader, BrokenFiles, Damage, Lane
from train.data.source import Source
from train.data.stream_files import StreamFiles
from train.data.text import Encoder
from train.data.tokenizer import load_tokenizer

_MOST_LANES, _FILES_PER_LANE = 64, 4


class Stream(Source):
    def __init__(
        self,
        folder: Path,
        files: StreamFiles,
        sizes: Settings,
        announces: bool,
        documents: bool = True,
        bos: int | None = None,
    ):
        """Make a stream. Only one rank of a group that shares rows `announces` what it finds."""
        self.folder, self.documents, self.bos = folder, documents, bos
        self._files, self._sizes, self._announces = files, sizes, announces
        self._encoder = Encoder(load_tokenizer(folder), files.field)
        self.vocab_size = self._encoder.tokenizer.vocab_size
        size = sizes.batch_size
        # a divisor of the batch size, with several files for each lane
        most = max(min(len(files.files) // _FILES_PER_LANE, size, _MOST_LANES), 1)
        self.num_lanes = max(n for n in range(1, most + 1) if size % n == 0)
        self._lanes: dict[int, Lane] = {}
        self._saved = [Lane.new_state() for _ in range(self.num_lanes)]
        self._broken = BrokenFiles(files, self._announce)

    @property
    def bos_id(self) -> int:
        return self._encoder.tokenizer.bos_id

    @property
    def description(self) -> str:
        files = counted(len(self._files.files), "file")
        described = (
            f"documents of {files}, streamed in {counted(self.num_lanes, 'lane')}, "
            f"{self._files.shuffle_tokens:,} tokens shuffled at once, "
            f"{'' if self.documents else 'not '}kept apart"
        )
        return described + (f", each after begin token {self.bos}" if self.bos is not None else "")

    @property
    def identity(self) -> dict[str, Any]:
        sizes = self._sizes
        return {
            **self._files.identity,
            "batch_size": sizes.batch_size,
            "seq_len": sizes.seq_len,
            "seed": sizes.seed,
            "documents": "mask" if self.documents else "ignore",
            "bos": self.bos,
        }

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        return type(self)(self.folder, self._files, self._sizes, self._announces, apart, bos)

    def of_sample(self, sample: int) -> Row:
        size = self._sizes.batch_size
        number = sample % size * self.num_lanes // size
        lane = self._open_lane(number)
        epoch = lane.epoch
        lane.skip(self._rows_before(number, sample) - lane.rows)
        row = lane.take()
        if epoch == 0 < lane.epoch:
            self._announce(f"lane {number} starts over, in a new order")
        return row

    def state(self, samples: int) -> dict[str, Any]:
        """Return the places of all lanes after `samples` samples. Every rank must call it. Raises
        ValueError on every rank if there are too many broken files on all ranks together.
        """
        for number, lane in self._lanes.items():
            lane.skip(self._rows_before(number, samples) - lane.rows)
        mine = {number: lane.state() for number, lane in self._lanes.items()}
        # a copy, since the thread may add to it meanwhile
        for theirs, broken in ranks.gather((mine, dict(self._broken.found))):
            for number, state in theirs.items():
                self._saved[number] = state
            self._broken.found |= broken
        self._broken.check()
        damages = sorted(self._broken.found.items())
        return {
            "lanes": list(self._saved),
            "broken": [[number, x.whole, x.reason] for number, x in damages],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self._saved = state["lanes"]
            found = {number: Damage(*damage) for number, *damage in state["broken"]}
            self._broken.found |= found
            self._broken.check()

    def _rows_before(self, lane: int, sample: int) -> int:
        """Return how many samples before `sample` are rows of a lane."""
        share = self._sizes.batch_size // self.num_lanes
        batches, place = divmod(sample, self._sizes.batch_size)
        return batches * share + min(max(place - lane * share, 0), share)

    def _open_lane(self, number: int) -> Lane:
        if number not in self._lanes:
            sizes, saved = self._sizes, self._saved[number]
            order = number, self.num_lanes, sizes.seed
            reader = BlockReader(self._files, self._encoder, *order, self.bos, self._broken)
            self._lanes[number] = Lane(reader, self._thread, sizes.seq_len, self.documents, saved)
        return self._lanes[number]

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="stream")

    def _announce(self, text: str) -> None:
        if self._announces:
            print(f"{self.folder}: {text}", file=sys.stderr, flush=True)
