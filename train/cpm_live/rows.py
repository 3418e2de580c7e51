"""Rows: instances packed into a fixed number of tokens, with the inputs of CPM-Live's models.

Rows are packed once, best fit among the open rows. Sample n of a run is one of them and a state of
a random generator, by which a Bee's answers have another order, and an Ant's text another hidden
part.
"""

from __future__ import annotations

import bisect
import math
from abc import abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bmt_burst import IGNORE_INDEX, Scores
from models.cpm_live.config import AntConfig, BeeConfig, LiveConfig
from models.cpm_live.scores import MOST_SLICES, ant_scores, bee_scores, slices_of
from train.base.wording import counted
from train.cpm_live.instances import COLUMNS, TASKS, Instance, shuffle_answers
from train.cpm_live.stored import InstanceFiles
from train.data.source import Stored
from train.data.token_file import TokenFile

_OPEN = 64  # rows that may still be filled
_DEEPEST = 8  # largest number of steps to a common ancestor that is distinguished
_HIDDEN_SHARE = 0.15  # hidden share of a text with task "mlm" (BERT, arXiv 1810.04805)
# The hidden tokens are in a few short runs (SpanBERT, arXiv 1907.10529).
_HIDDEN_LENGTH, _MOST_RUNS = 3, 16
_ORDER, _TRAINING, _EVALUATION = 0, 1, 2  # seeds for different uses of random numbers
# the arguments of bee_scores after the configuration
_BEE_SCORED = "length context sample_ids num_segments segment segment_rel_offset segment_rel span"


@dataclass(frozen=True)
class Packed:
    """Rows of items: row r has items[starts[r] : starts[r + 1]], in this order. Both are int64."""

    starts: np.ndarray
    items: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        return self.items[self.starts[row] : self.starts[row + 1]].tolist()


def pack_rows(
    lengths: np.ndarray, slices: np.ndarray, size: int, most_slices: int, seed: int
) -> Packed:
    """Pack items of these lengths and slices (N,) into rows of at most these sizes, by the seed."""
    rows: list[list[int]] = []
    left: list[int] = []  # slices that each row has room for
    spare: list[tuple[int, int]] = []  # room and number of each open row, rising
    order = np.random.default_rng((seed, _ORDER)).permutation(len(lengths))
    for item, length, cost in zip(
        order.tolist(), lengths[order].tolist(), slices[order].tolist(), strict=True
    ):
        fitting = range(bisect.bisect_left(spare, (length, -1)), len(spare))
        at = next((at for at in fitting if left[spare[at][1]] >= cost), len(spare))
        if at < len(spare):
            room, row = spare.pop(at)
        else:
            room, row = size, len(rows)
            rows.append([])
            left.append(most_slices)
            if len(spare) == _OPEN:
                # close the fullest row
                spare.remove(
                    min(spare, key=lambda at: min(at[0] / size, left[at[1]] / most_slices))
                )
        rows[row].append(item)
        left[row] -= cost
        if room > length:
            bisect.insort(spare, (room - length, row))
    counts = np.cumsum([0, *map(len, rows)])
    return Packed(counts, np.array([item for row in rows for item in row], dtype=np.int64))


@dataclass(frozen=True)
class Row:
    """A whole row of S tokens, on the CPU.

    fields     (S,) for each token, by the models' names; `length` and a Bee's `segment_rel` belong
               to the row
    scores     the mask, and the rows of the bias table
    targets    (S,) int64, IGNORE_INDEX where there is none; target_subs (S,) has their sub-ids
    instances  number of instances
    """

    fields: dict[str, Tensor]
    scores: Scores
    targets: Tensor
    target_subs: Tensor
    instances: int


class InstanceFile(TokenFile):
    """A folder of instances for one kind of model. Raises the same errors as TokenFile."""

    def __init__(self, folder: str | Path, instances: str):
        self.instances = instances
        super().__init__(folder)

    @cached_property
    def all(self) -> InstanceFiles:
        return InstanceFiles(self.folder, np.dtype(self.index["dtype"]))

    @property
    def hashes(self) -> dict[str, str]:
        """The sha256 of the files of tokens, sub-ids, segments and tasks."""
        return {name: x for name, x in self.index["sha256"].items() if name.endswith(".bin")}

    def instance(self, number: int, part: slice = slice(None)) -> Instance:
        """Return an instance, as InstanceFiles does. Raises ValueError for unknown tokens."""
        found = self.all.instance(number, part)
        if len(found) and found.tokens.max() >= self.index["vocab_size"]:
            raise ValueError(
                f"{self.folder}: expected tokens below {self.index['vocab_size']}, the size of the "
                f"vocabulary, got {int(found.tokens.max())} in instance {number}"
            )
        return found


class PackedRows(Stored):
    """The instances of a folder as rows of `seq_len` tokens. Raises ValueError if none fits.

    instances      number of instances that are read
    left_out, cut  number of instances longer than a row, which are skipped, or read in parts
    too_many       number of skipped instances whose texts to predict would take minutes to plan
    """

    file: InstanceFile
    documents = True  # instances are always kept apart
    instances: int

    left_out = too_many = cut = 0

    def __init__(self, file: InstanceFile, config: LiveConfig, seq_len: int, seed: int):
        super().__init__(file, seed)
        self.config, self.seq_len = config, seq_len
        lengths, slices = self._items()
        if not len(lengths):
            are_many = (f"{has} too many texts to predict" for has in ("has", "have"))
            many = f"; {counted(self.too_many, *are_many)}" if self.too_many else ""
            raise ValueError(
                f"{file.folder} has no instance that fits into --seq-len {seq_len}{many}"
            )
        self._rows = pack_rows(lengths, slices, seq_len, MOST_SLICES, seed)

    @classmethod
    def open(cls, folder: str, model: LiveConfig, seq_len: int, seed: int) -> Self:
        return cls(InstanceFile(folder, model.model_type), model, seq_len, seed)

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        """Return the rows unchanged: instances are always kept apart."""
        return self

    @property
    def example_scores(self) -> Scores:
        return self.read(0).scores

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def description(self) -> str:
        parts = [counted(self.instances, "instance")]
        for count, what, done in (
            (self.left_out, "longer than a row", "left out"),
            (self.too_many, "with too many texts to predict", "left out"),
            (self.cut, "longer than a row", "cut"),
        ):
            if count:
                parts.append(counted(count, f"{what} is {done}", f"{what} are {done}"))
        return ", ".join(parts)

    @property
    def identity(self) -> dict[str, Any]:
        text = {"tokens": len(self.file.tokens), "digest": self.file.digest, **self.file.hashes}
        return text | {"seq_len": self.seq_len, "seed": self.seed, "documents": "instances"}

    def of_sample(self, sample: int) -> Row:
        return self._row(
            self.order(sample), np.random.default_rng((self.seed, _TRAINING, sample)), training=True
        )

    def read(self, index: int) -> Row:
        """Return row `index`, which is the same every time."""
        return self._row(
            index, np.random.default_rng((self.seed, _EVALUATION, index)), training=False
        )

    @abstractmethod
    def _items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and mask slices, (N,), of each instance that fits, or of each part."""

    @abstractmethod
    def _row(self, index: int, chance: np.random.Generator, training: bool) -> Row:
        """Return the row. For `training`, its answers are in random order."""


class BeeRows(PackedRows):
    """Rows of a Bee. Raises ValueError for a model without buckets for related segments."""

    config: BeeConfig

    def _items(self) -> tuple[np.ndarray, np.ndarray]:
        cap(self.config)
        # a key separates each text from others
        lengths, slices = self.file.all.lengths, slices_of(self.file.all.kinds)
        fits, few = lengths <= self.seq_len, slices <= MOST_SLICES
        [self._fitting] = np.nonzero(fits & few)
        self.instances = len(self._fitting)
        self.left_out, self.too_many = int((~fits).sum()), int((fits & ~few).sum())
        return lengths[self._fitting], slices[self._fitting]

    def _row(self, index: int, chance: np.random.Generator, training: bool) -> Row:
        instances = [self.file.instance(int(self._fitting[item])) for item in self._rows[index]]
        if training:
            instances = [shuffle_answers(instance, chance) for instance in instances]
        return bee_row(self.config, instances, self.seq_len, self.file.index["eos_id"])


def bee_row(config: BeeConfig, instances: Sequence[Instance], seq_len: int, eos_id: int) -> Row:
    """Return a row of instances, one after the other, each a span, then padding of 0."""
    parts = [_bee_fields(instance, eos_id) for instance in instances]
    blocks: list[np.ndarray] = []
    filled = 0
    for part in parts:
        mine = [relation(parents, cap(config)).ravel() for parents in part.pop("trees")]
        starts = filled + np.cumsum([0, *map(len, mine)])
        part["segment_rel_offset"] = starts[part["sample_ids"]]
        blocks, filled = blocks + mine, int(starts[-1])
    fields = {name: _pad(name, [part[name] for part in parts], seq_len) for name in parts[0]}
    fields |= {
        "segment_rel": torch.from_numpy(np.concatenate(blocks)),
        **_number_spans(instances, seq_len),
    }
    targets, target_subs = (fields.pop(name).long() for name in ("targets", "target_subs"))
    scores = bee_scores(config, *(fields[name] for name in _BEE_SCORED.split()))
    return Row(fields, scores, targets, target_subs, len(instances))


def _bee_fields(instance: Instance, eos_id: int) -> dict[str, Any]:
    """Return the fields of an instance that no row changes, and the parents in its "trees"."""
    counts, sample = instance.segments[:, COLUMNS.tokens], instance.segments[:, COLUMNS.sample]
    sizes = np.bincount(sample)
    numbers = np.concatenate([np.arange(size) for size in sizes])
    hidden = instance.segments[:, COLUMNS.kind].astype(bool)
    of_token = np.repeat(np.arange(len(counts)), counts)
    last = np.zeros(len(instance), dtype=bool)
    last[np.cumsum(counts) - 1] = True
    following = np.where(last, eos_id, np.append(instance.tokens[1:], eos_id))
    following_subs = np.where(last, 0, np.append(instance.subs[1:], 0))
    predicts = hidden[of_token]
    return {
        "input": instance.tokens,
        "input_sub": instance.subs,
        "context": ~predicts,
        "sample_ids": sample[of_token],
        "num_segments": sizes[sample][of_token],
        "segment": numbers[of_token],
        "targets": np.where(predicts, following, IGNORE_INDEX),
        "target_subs": np.where(predicts, following_subs, 0),
        "trees": np.split(instance.segments[:, COLUMNS.parent], np.cumsum(sizes)[:-1]),
    }


def cap(config: BeeConfig) -> int:
    """Return the steps to a common ancestor that count, or raise ValueError if it is one."""
    buckets = config.position_bias_num_segment_buckets
    if buckets < 4:
        raise ValueError(
            f"position_bias_num_segment_buckets must be at least 4 to train on trees, got {buckets}"
        )
    return min(_DEEPEST, math.isqrt(buckets))


def relation(parents: np.ndarray, most: int) -> np.ndarray:
    """Return how segments of a tree are related: (N, N) int32 [query, key]. It is 0 for a
    segment and itself, else 1 + u most + w, where u and w are the steps from the query and from
    the key to their lowest common ancestor, at most `most` - 1.
    """
    # above[i, j]: whether segment j is on the way from segment i to the root
    above = np.eye(len(parents), dtype=np.float32)
    for segment, parent in enumerate(parents.tolist()):
        if parent >= 0:
            above[segment] += above[parent]
    common = (above @ above.T).astype(np.int32)
    depth = common.diagonal()
    steps = np.minimum(depth[:, None] - common, most - 1)
    found = 1 + steps * most + np.minimum(depth[None] - common, most - 1)
    np.fill_diagonal(found, 0)
    return found.astype(np.int32)


class AntRows(PackedRows):
    """Rows of an Ant: texts, each after a prompt of its task. Long ones are cut into parts.

    A last part of one token would predict nothing, so it begins with the token before.
    """

    config: AntConfig

    def _items(self) -> tuple[np.ndarray, np.ndarray]:
        check_ant(self.config)
        room = self.seq_len - self.config.prompt_length
        if room < 2:
            prompt = counted(self.config.prompt_length, "token")
            raise ValueError(f"--seq-len {self.seq_len} leaves no room after a prompt of {prompt}")
        lengths = self.file.all.lengths
        parts = -(-lengths // room)
        self.cut = int((parts > 1).sum())
        self._instance = np.repeat(np.arange(len(lengths)), parts)
        part = np.arange(len(self._instance)) - np.repeat(np.cumsum(parts) - parts, parts)
        self._start = np.minimum(part * room, lengths[self._instance] - 2)
        tokens = np.minimum(lengths[self._instance] - self._start, room)
        self.instances = len(lengths)
        runs = hidden_runs(tokens, self.file.all.kinds[self._instance])
        return tokens + self.config.prompt_length, slices_of(runs)

    def _row(self, index: int, chance: np.random.Generator, training: bool) -> Row:
        room, texts, tasks = self.seq_len - self.config.prompt_length, [], []
        for item in self._rows[index]:
            start = int(self._start[item])
            instance = self.file.instance(int(self._instance[item]), slice(start, start + room))
            texts.append(instance.tokens)
            tasks.append(int(instance.segments[0, COLUMNS.kind]))
        hidden = [hide(len(text), task, chance) for text, task in zip(texts, tasks, strict=True)]
        return ant_row(self.config, texts, tasks, hidden, self.seq_len)


def hidden_runs(tokens: ArrayLike, task: ArrayLike) -> np.ndarray:
    """Return the largest number of runs that `hide` hides in each number of tokens."""
    short = np.clip(
        np.rint(_HIDDEN_SHARE * np.asarray(tokens) / _HIDDEN_LENGTH), 1, _MOST_RUNS
    ).astype(np.int64)
    return np.where(np.equal(task, TASKS["mlm"]), short, 1)


def hide(tokens: int, task: int, chance: np.random.Generator) -> np.ndarray:
    """Return which of two or more tokens are hidden, (tokens,) bool. The first one never is.

    Task "lm" hides a tail of random length. Task "mlm" hides a share of all tokens in short runs,
    one run in each of several equal parts.
    """
    hidden = np.zeros(tokens, dtype=bool)
    if task == TASKS["lm"]:
        hidden[chance.integers(1, tokens) :] = True
        return hidden
    edges = np.linspace(1, tokens, int(hidden_runs(tokens, task)) + 1).astype(int)
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        length = max(round(_HIDDEN_SHARE * (stop - start)), 1)
        at = int(chance.integers(start, stop - length + 1))
        hidden[at : at + length] = True
    return hidden


def ant_row(
    config: AntConfig,
    texts: Sequence[np.ndarray],
    tasks: Sequence[int],
    hidden: Sequence[np.ndarray],
    seq_len: int,
) -> Row:
    """Return a row of texts, each a span of a prompt and a segment, then padding, which is a span.

    As in CPM-Live, only a row's first columns are looked up among prompts, others among words.
    """
    parts, spans = [], []
    for text, task, hides in zip(texts, tasks, hidden, strict=True):
        prompt, size = config.prompt_length, config.prompt_length + len(text)
        tokens = np.concatenate((np.arange(prompt) + prompt * task, text))
        context = np.concatenate((np.ones(prompt, dtype=bool), ~hides))
        following = np.full(size, IGNORE_INDEX)
        at = np.nonzero(~context)[0]
        following[at - 1] = tokens[at]
        segment = np.repeat([0, task], [prompt, len(text)])
        parts.append(
            {"input": tokens, "context": context, "segment": segment, "targets": following}
        )
        spans.append(tokens)
    fields = {name: _pad(name, [part[name] for part in parts], seq_len) for name in parts[0]}
    fields |= _number_spans(spans, seq_len, padding=len(spans))
    targets = fields.pop("targets").long()
    scores = ant_scores(config, *(fields[x] for x in ("length", "context", "segment", "span")))
    return Row(fields, scores, targets, torch.zeros_like(targets), len(texts))


def check_ant(config: AntConfig) -> None:
    most = max(TASKS.values())
    if min(config.prompt_types, config.segment_types) <= most:
        raise ValueError(
            f"expected prompt_types and segment_types above {most}, the largest number of a task, "
            f"got {config.prompt_types} and {config.segment_types}"
        )
    if (most + 1) * config.prompt_length > config.vocab_size:
        raise ValueError(
            f"prompts are also looked up as words: expected a vocab_size of at least "
            f"{(most + 1) * config.prompt_length} for a prompt_length of {config.prompt_length}, "
            f"got {config.vocab_size}"
        )


def _pad(name: str, parts: Sequence[np.ndarray], seq_len: int) -> Tensor:
    """Return the joined parts with padding, (seq_len,): int32, bool, or int64 for targets."""
    fill = IGNORE_INDEX if name == "targets" else 0
    whole = np.full(seq_len, fill, dtype=bool if name == "context" else np.int32)
    joined = np.concatenate(parts)
    whole[: len(joined)] = joined
    return torch.from_numpy(whole)


def _number_spans(parts: Sequence[Sized], seq_len: int, padding: int = 0) -> dict[str, Tensor]:
    """Return the row's length, and the number of the part of each token."""
    lengths = [len(part) for part in parts]
    span = np.full(seq_len, padding, dtype=np.int32)
    span[: sum(lengths)] = np.repeat(np.arange(len(parts)), lengths)
    return {"length": torch.tensor(sum(lengths), dtype=torch.int32), "span": torch.from_numpy(span)}
