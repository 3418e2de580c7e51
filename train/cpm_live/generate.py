"""Generation: CPM-Bee fills in the texts under "<ans>" of an instance, CPM-Ant continues a text.

The bias needs one row of its table for each earlier token. So a later token takes time and memory
in proportion to the tokens before it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmt_burst import Cache, Scores
from bmt_burst.bias.call_bias import CallBias, SegmentIds
from bmt_burst.memories.protocol import reserve_memory
from models.cpm_ant import CPMAnt, ant_scores
from models.cpm_bee import CPMBee, bee_scores
from models.cpm_live.layers import LiveModel
from train.base.wording import naming
from train.cpm_live.batches import extended_table
from train.cpm_live.instances import ANSWER, COLUMNS, TASKS, Instance, bee_instance
from train.cpm_live.rows import Row, bee_row
from train.cpm_live.tokenizers import AntTokenizer, BeeTokenizer, SubIds
from train.generation.decoding import Choose


def fill_in(
    model: CPMBee, tokenizer: BeeTokenizer, prompt: str, tokens: int, choose: Choose
) -> str:
    """Return the instance in `prompt`, JSON such as `{"question": "2 + 3", "<ans>": ""}`, answered.

    Each text under "<ans>" is continued by up to `tokens` tokens, which `choose` takes from logits
    (V,). Raises ValueError for other prompts.
    """
    with naming("the prompt of a CPM-Bee must be an instance as JSON", RecursionError):
        record = json.loads(prompt)
    instance, sub_ids = bee_instance(tokenizer, record)
    [blanks] = np.nonzero(instance.segments[:, COLUMNS.kind])
    if not len(blanks):
        raise ValueError(
            f'there is nothing to fill in: give a text under {ANSWER}, as in {{"{ANSWER}": ""}}'
        )
    row = bee_row(model.config, [instance], len(instance), tokenizer.eos_id)
    decoder = BeeDecoder(model, _context_fields(row), len(instance) + tokens * len(blanks))
    allowed = _allowed_tokens(decoder, tokenizer, sub_ids)
    answers = []
    for segment in blanks.tolist():
        first, *begun = _segment_places(decoder, instance, segment)
        decoder.begin(segment, first)
        for place in begun:
            decoder.append(place)
        found = continue_row(decoder, tokens, tokenizer.eos_id, choose, allowed)
        answers.append(tokenizer.text(map(decoder.token, [*begun, *found]), sub_ids))
    return json.dumps(_put_answers(record, iter(answers)), ensure_ascii=False)


def _context_fields(row: Row) -> dict[str, Tensor]:
    """Return the arguments of BeeDecoder: the tokens that are given, and the extended table."""
    given = row.fields["context"]
    fields = {
        name: x[given]
        for name, x in row.fields.items()
        if x.shape == given.shape and name != "span"
    }
    ext_tokens, ext_subs = extended_table([row])
    return fields | {
        "segment_rel": row.fields["segment_rel"],
        "ext_table_ids": ext_tokens,
        "ext_table_sub": ext_subs,
    }


def _segment_places(decoder: BeeDecoder, instance: Instance, segment: int) -> Iterator[int]:
    stop = int(instance.segments[: segment + 1, COLUMNS.tokens].sum())
    for at in range(stop - int(instance.segments[segment, COLUMNS.tokens]), stop):
        yield decoder.place(int(instance.tokens[at]), int(instance.subs[at]))


def _allowed_tokens(decoder: BeeDecoder, tokenizer: BeeTokenizer, sub_ids: SubIds) -> Tensor:
    """Return the tokens that an answer may have, (V,) bool: not those that frame texts."""
    places = len(decoder.logits)
    words = decoder.model.config.vocab_size
    allowed = torch.zeros(places, dtype=torch.bool)
    allowed[: tokenizer.vocab_size] = True
    allowed[[tokenizer.bos_id, tokenizer.root_id, tokenizer.pad_id]] = False
    for place in range(words, places):
        allowed[place] = sub_ids.text(*decoder.token(place)) is not None
    return allowed.to(decoder.logits.device)


def _put_answers(record: Any, answers: Iterator[str]) -> Any:
    """Return the record with these texts under "<ans>", in the order of the texts there."""
    found = copy.deepcopy(record)
    main = found[0] if isinstance(found, list) else found

    def replaced(value: Any) -> Any:
        return (
            {k: replaced(v) for k, v in value.items()} if isinstance(value, dict) else next(answers)
        )

    main[ANSWER] = replaced(main[ANSWER])
    return found


def continue_text(
    model: CPMAnt, tokenizer: AntTokenizer, prompt: str, tokens: int, choose: Choose
) -> str:
    """Return the text `prompt` and up to `tokens` more tokens, as `fill_in` takes them."""
    size, task = model.config.prompt_length, TASKS["lm"]
    text = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    row = torch.tensor([*range(size * task, size * (task + 1)), *text])
    segments = torch.tensor([0] * size + [task] * len(text))
    decoder = AntDecoder(model, row, segments, len(row) + tokens)
    known = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    texts = [i for i in range(tokenizer.vocab_size) if tokenizer.vocabulary.is_text(i)]
    known[[*texts, tokenizer.eos_id]] = True
    known = known.to(decoder.logits.device)
    found = continue_row(decoder, tokens, tokenizer.eos_id, choose, known)
    return prompt + tokenizer.decode(found)


class _Row:
    """The tokens of a row so far, with the inputs of their bias, keys and values."""

    def __init__(self, model: LiveModel, scores: Scores, limit: int):
        weight = model.encoder.output_layernorm.weight
        self.model, self.count = model, scores.seq_len
        self.cache = Cache(model.sp, model.config.num_layers, limit)
        self._pairs = scores.pairs.to(weight.device)
        self._distances = scores.distances.to(weight.device)
        self._other = scores.other
        with reserve_memory(limit):
            self._tokens = torch.zeros(4, limit, dtype=torch.int32, device=weight.device)
        self._tokens[:, : self.count] = scores.tokens(torch.arange(self.count)).to(weight.device)

    def add(self, group: int, base: int, segment: int) -> Tensor:
        """Add a token that attends to all so far. Return its rows of the bias table: (1, T)."""
        new = torch.tensor([group, base, segment, self.count], dtype=torch.int32)
        self._tokens[:, self.count] = new.to(self._tokens.device)
        self.count += 1
        groups, bases, segments, positions = self._tokens[:, : self.count]
        of_segments = SegmentIds(
            groups[-1:], bases[-1:], groups, segments, self._pairs, self._other
        )
        table = self.model.position_bias.table()
        return CallBias(table, positions[-1:], positions, self._distances, of_segments).rows()


class BeeDecoder:
    """A CPM-Bee and a row that it continues with answers.

    row    the fields of one instance on the CPU, without padding, by the names of bee_scores'
           arguments, (S,), except `length` and `span`. Also `input` and `input_sub`, (S,), and the
           extended table, `ext_table_ids` and `ext_table_sub`, (N,)
    limit  most tokens of the row, including S

    Answers are at the row's end, in any order of their segments. This is exact, because distances
    only count within a segment. Tokens of `logits` beyond the vocabulary are extended ones.
    """

    @torch.inference_mode()
    def __init__(self, model: CPMBee, row: Mapping[str, Tensor], limit: int):
        self.model = model
        names = ("context", "sample_ids", "num_segments", "segment", "segment_rel_offset")
        fields = {name: row[name] for name in (*names, "segment_rel")}
        tokens = len(row["input"])
        span = torch.zeros(tokens, dtype=torch.int32)
        scores = bee_scores(model.config, tokens, **fields, span=span)
        at = int((row["sample_ids"] == 0).int().argmax())  # a token of the main sample
        self._segments = int(row["num_segments"][at])
        self._offset = int(row["segment_rel_offset"][at])
        self._group, self._segment = int(scores.group[at]), -1
        self._row = _Row(model, scores, limit)
        self._device = model.input_embedding.weight.device
        self._extended = [row["ext_table_ids"].tolist(), row["ext_table_sub"].tolist()]
        self._table = [row[name].to(self._device) for name in ("ext_table_ids", "ext_table_sub")]
        given = (row[name].unsqueeze(0).to(self._device) for name in ("input", "input_sub"))
        self.logits = model(*given, *self._table, scores, cache=self._row.cache)[0, -1]

    def begin(self, segment: int, start: int) -> None:
        """Begin the answer that is segment `segment` of the main sample's tree."""
        self._segment = segment
        self.append(start)

    @torch.inference_mode()
    def append(self, token: int) -> None:
        """Add the token with this place in `logits`, (V,), which are those of what follows it."""
        assert self._segment >= 0, "an answer begins before it is continued"
        base = self._offset + self._segment * self._segments
        rows = self._row.add(self._group, base, self._segment)
        new = (torch.tensor([[x]], device=self._device) for x in self.token(token))
        self.logits = self.model(*new, *self._table, cache=self._row.cache, rows=rows)[0, -1]

    def token(self, place: int) -> tuple[int, int]:
        """Return the token with this place in `logits`, and its sub-id."""
        if place < (words := self.model.config.vocab_size):
            return place, 0
        ids, subs = self._extended
        return ids[place - words], subs[place - words]

    def place(self, token: int, sub: int) -> int:
        """Return a token's place in `logits`. A sub-id above 0 belongs to the extended table."""
        if not sub:
            return token
        extended = list(zip(*self._extended, strict=True))
        return self.model.config.vocab_size + extended.index((token, sub))


class AntDecoder:
    """A CPM-Ant and a row that it continues.

    tokens    (S,): prompt_length ids of a prompt, then ids of text; all are context
    segments  (S,): the types of their segments; new tokens have the last one's type
    limit     most tokens of the row, including S
    """

    @torch.inference_mode()
    def __init__(self, model: CPMAnt, tokens: Tensor, segments: Tensor, limit: int):
        self.model, self._type = model, int(segments[-1])
        nothing = torch.zeros_like(segments)
        scores = ant_scores(model.config, len(tokens), nothing == 0, segments, nothing)
        self._row = _Row(model, scores, limit)
        self._device = model.input_embedding.weight.device
        given = (x.unsqueeze(0).to(self._device) for x in (tokens, segments))
        positions = torch.arange(len(tokens), device=self._device)
        self.logits = model(*given, positions, scores, cache=self._row.cache)[0, -1]

    @torch.inference_mode()
    def append(self, token: int) -> None:
        rows = self._row.add(0, self._type * self.model.config.segment_types, self._type)
        new = (torch.tensor([[x]], device=self._device) for x in (token, self._type))
        position = torch.tensor([self._row.count - 1], device=self._device)
        self.logits = self.model(*new, position, cache=self._row.cache, rows=rows)[0, -1]


def continue_row(
    decoder: BeeDecoder | AntDecoder, tokens: int, end: int, choose: Choose, allowed: Tensor
) -> list[int]:
    """Return up to `tokens` more tokens before `end`. `choose` takes them from logits (V,) of the
    `allowed` ones, (V,) bool.
    """
    found: list[int] = []
    for _ in range(tokens):
        token = choose(decoder.logits.where(allowed, -torch.inf))
        if token == end:
            break
        found.append(token)
        decoder.append(token)
    return found
