"""Instances: lines of data for CPM-Live's models, as tokens and segments.

CPM-Bee: a line is an object of texts and objects, or a list of it and in-context samples. The texts
under its key "<ans>" are to be predicted. Each key and text is a segment of a tree below a root.

    [{"question": "2 + 3", "<ans>": "5"}, {"question": "1 + 1", "<ans>": "2"}]

CPM-Ant: an object with a text, which is one segment, and optionally a task, "lm" or "mlm".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from train.cpm_live.tokenizers import AntTokenizer, BeeTokenizer, SubIds
from train.data.records import BadRecord, check_unicode
from train.data.text import text_in

ANSWER = "<ans>"
TASKS = {"mlm": 1, "lm": 2}  # and the types of their segments
MOST_SEGMENTS = 2048  # of a tree; the relations of a tree are a table of all pairs
MOST_SUBS = 1 << 16


class Field(NamedTuple):
    """The columns of `Instance.segments`."""

    tokens: int
    parent: int  # an earlier segment of the same sample; -1 for a root, and for an Ant
    sample: int  # 0 for the instance, 1, ... for its in-context samples
    kind: int  # for a Bee whether it is to be predicted, for an Ant its type


COLUMNS = Field(*range(4))


@dataclass(frozen=True)
class Instance:
    """One instance.

    tokens    (T,) int64
    subs      (T,) int64, the sub-ids of the tokens
    segments  (N, 4) int32, one after the other, with the columns of Field
    """

    tokens: np.ndarray
    subs: np.ndarray
    segments: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


class BeeReader:
    """Reads a Bee's records. Raises BadRecord for one without a text to predict."""

    field = None

    def __init__(self, tokenizer: BeeTokenizer, _json_field: str):
        self._tokenizer = tokenizer

    def of_record(self, record: Any) -> Instance:
        instance, _ = bee_instance(self._tokenizer, record)
        if not instance.segments[:, COLUMNS.kind].any():
            raise BadRecord(
                f"there is no text under the key {ANSWER}, so there is nothing to predict"
            )
        return instance

    def of_text(self, text: str) -> Instance:
        raise ValueError(
            'CPM-Bee reads .jsonl: put a text into an object, such as {"<ans>": "..."}'
        )


class AntReader:
    """Reads texts. The parts of a .txt are one instance. stored.py writes its begin and end."""

    def __init__(self, tokenizer: AntTokenizer, json_field: str):
        self._tokenizer, self.field = tokenizer, json_field

    def of_record(self, record: Any) -> Instance:
        text = text_in(record, self.field)
        task = record.get("task", "lm")
        if not isinstance(task, str) or task not in TASKS:
            raise BadRecord(f"task must be one of {', '.join(TASKS)}, got {task!r}")
        return self._instance(text, TASKS[task])

    def of_text(self, text: str) -> Instance:
        return self._instance(text, TASKS["lm"])

    def _instance(self, text: str, task: int) -> Instance:
        tokens = self._tokenizer.encode(text)
        return Instance(
            tokens, np.zeros_like(tokens), np.array([[len(tokens), -1, 0, task]], dtype=np.int32)
        )


def bee_instance(tokenizer: BeeTokenizer, record: Any) -> tuple[Instance, SubIds]:
    """Return the instance in a line, and the texts of its sub-ids. Raises BadRecord for none."""
    samples = record if isinstance(record, list) else [record]
    if not samples:
        raise BadRecord("expected an object and in-context samples, got an empty list")
    sub_ids, tokens, subs, segments = SubIds(), [], [], []
    for sample, values in enumerate(samples):
        tree = list(_walk_tree(values))
        if len(tree) > MOST_SEGMENTS:
            raise BadRecord(f"expected at most {MOST_SEGMENTS} keys and texts, got {len(tree)}")
        for node in tree:
            pieces = [(tokenizer.root_id, None)] if node.parent < 0 else tokenizer.pieces(node.text)
            pieces = [
                (tokenizer.bos_id, None),
                *pieces,
                *[(tokenizer.eos_id, None)] * (not node.answer),
            ]
            tokens += [token for token, _ in pieces]
            subs += [sub_ids.of(*piece) for piece in pieces]
            segments.append((len(pieces), node.parent, sample, node.answer and sample == 0))
    if max(subs) >= MOST_SUBS:
        raise BadRecord(
            f"expected at most {MOST_SUBS} numbered tokens of one kind, got {max(subs) + 1}"
        )
    return Instance(np.array(tokens), np.array(subs), np.array(segments, dtype=np.int32)), sub_ids


class _Node(NamedTuple):
    text: str
    parent: int
    answer: bool  # a text under <ans>


def _walk_tree(values: Any) -> Iterator[_Node]:
    """Yield the root, keys and texts of an object, depth first."""
    if not isinstance(values, dict):
        raise BadRecord(f"expected an object of texts and objects, got {type(values).__name__}")
    yield _Node("", -1, False)
    count, waiting = 1, [(key, value, 0, key == ANSWER) for key, value in reversed(values.items())]
    while waiting:
        key, value, parent, answer = waiting.pop()
        yield _Node(check_unicode(key), parent, False)
        parent, count = count, count + 1
        if isinstance(value, dict):
            waiting += [(name, inner, parent, answer) for name, inner in reversed(value.items())]
        elif isinstance(value, str):
            yield _Node(check_unicode(value), parent, answer)
            count += 1
        else:
            raise BadRecord(
                f"the value of {key!r} must be a text or an object, got {type(value).__name__}"
            )


def shuffle_answers(instance: Instance, chance: np.random.Generator) -> Instance:
    """Return a Bee's instance with the items of each object under `<ans>` in another order."""
    tree = instance.segments[instance.segments[:, COLUMNS.sample] == 0]
    parents = tree[:, COLUMNS.parent].tolist()
    answer = int(tree[:, COLUMNS.kind].argmax())  # a predicted text, and then the key `<ans>`
    while parents[answer]:
        answer = parents[answer]
    order = _order_segments(parents, answer, chance)
    if order == list(range(len(tree))):
        return instance
    whole = np.concatenate((order, np.arange(len(tree), len(instance.segments))))
    counts = instance.segments[:, COLUMNS.tokens]
    starts, lengths = (np.cumsum(counts) - counts)[whole], counts[whole]
    tokens = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(len(instance))
    segments, moved = instance.segments[whole], np.argsort(whole)
    parents = segments[: len(tree), COLUMNS.parent]
    segments[: len(tree), COLUMNS.parent] = np.where(parents < 0, -1, moved[parents])
    return Instance(instance.tokens[tokens], instance.subs[tokens], segments)


def _order_segments(parents: list[int], answer: int, chance: np.random.Generator) -> list[int]:
    """Return the segments of a tree, depth first. Siblings below `answer` are in random order."""
    children: list[list[int]] = [[] for _ in parents]
    for segment, parent in enumerate(parents[1:], 1):
        children[parent].append(segment)
    found, waiting, inside = [], [0], set()
    while waiting:
        at = waiting.pop()
        found.append(at)
        following = children[at]
        if at == answer or at in inside:
            inside.update(following)
            if len(following) > 1:
                following = [following[i] for i in chance.permutation(len(following))]
        waiting += reversed(following)
    return found
