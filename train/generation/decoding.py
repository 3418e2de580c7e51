"""Decoding with a cache of keys and values, on one rank or several. For CPM-Live's models it also
keeps the bias's inputs.

The given tokens are computed once, as in training. For them a CPM computes the logits of the last
token only. The bias needs one row of its table for each earlier token. So a later token takes
time and memory in proportion to the tokens before it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bmt_burst import Cache, Decoder, Scores
from bmt_burst.bias.call_bias import CallBias, SegmentIds
from bmt_burst.memories.protocol import reserve_memory
from models.cpm import CPM
from models.cpm_ant import CPMAnt, ant_scores
from models.cpm_bee import CPMBee, bee_scores
from models.cpm_live.layers import LiveModel
from train.base.wording import counted
from train.data.tokenizer_base import Tokenizer
from train.generation.text_rules import TextRules

_CHUNK = 1 << 16  # tokens of a prompt: hidden states of a longer one would take most of the memory
_TICK = 1.0  # seconds between signs of life, at least

Choose = Callable[[Tensor], int]  # a token from logits (V,)
# returns the prompt with more tokens, of (model, tokenizer, prompt, most tokens, Choose)
Generator = Callable[[Any, Any, str, int, Choose], str]


def sampler(
    device: torch.device,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Choose:
    """Return a function that chooses a token from logits (V,). Temperature 0 is greedy. Tokens are
    among the top_k most likely ones (0: all), and among the fewest of these with a total
    probability of top_p. Raises ValueError for settings out of range.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature must be finite and not negative, got {temperature}")
    if top_k < 0:
        raise ValueError(f"--top-k must not be negative, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {seed}")
    generator = torch.Generator(device).manual_seed(seed)
    return lambda logits: _sample(logits.float(), temperature, top_k, top_p, generator)


def _sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Choose a token from logits (V,), as `sampler` describes."""
    if temperature == 0:
        return int(logits.argmax())
    # the most likely token gets 0 at any temperature
    logits = (logits.double() - logits.max()) / temperature
    probs, tokens = logits.softmax(-1).sort(descending=True)
    if top_k:
        probs = probs[:top_k]
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p * probs.sum(), 0.0)
    return int(tokens[torch.multinomial(probs, 1, generator=generator)])


class Speed:
    """The times of a prompt and of the tokens after it.

    alive  is called now and then, with what is computed next
    """

    def __init__(self, alive: Callable[[str], None] = lambda doing: None):
        self.alive = alive
        self.prompt, self.prefill, self._steps = 0, 0.0, list[float]()
        self._since = self._told = 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def note(self, tokens: int, are_prompt: bool) -> None:
        """Note that tokens were computed: some of the prompt, or a new one."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        if are_prompt:
            self.prompt, self.prefill = self.prompt + tokens, self.prefill + seconds
        else:
            self._steps.append(seconds)
        if now - self._told > _TICK:
            self._told = now
            self.alive(f"computing token {self.prompt + len(self._steps)}")

    def __str__(self) -> str:
        """Return the rates of what was computed."""
        parts = []
        if self.prompt:
            rate = self.prompt / self.prefill
            parts += [f"prefill of {counted(self.prompt, 'token')}: {rate:,.1f} tokens/s"]
        if self._steps:
            parts += [f"decoding: {statistics.median(self._steps) * 1e3:,.2f} ms a token"]
        return "; ".join(parts)


def continue_text(
    model: CPM,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    choose: Choose,
    rules: TextRules | None = None,
    chunk: int | None = None,
    speed: Speed | None = None,
) -> str:
    """Return the prompt and up to `tokens` more tokens, fewer if the model ends the text.

    rules  how texts begin and end. By default, nothing is put in front of them
    chunk  the most tokens of the prompt that all ranks of the model compute at once, by default
           65,536
    speed  notes the times

    Rotary scalings by length use that of the text so far, as in transformers: earlier tokens are
    not rotated again. If the model has several ranks, all call this, and `choose` must return the
    same token on each.
    """
    rules = rules or TextRules()
    begin, given = rules.encode(tokenizer, prompt)
    ids = begin + given
    speed, limit = speed or Speed(), len(ids) + tokens
    rules.warn(tokenizer, prompt, len(ids), tokens)
    fresh = ids
    with Decoder(model, Cache(model.sp, model.config.num_layers, limit)) as decoder:
        speed.begin()
        for _ in range(tokens):
            logits = _compute(model, decoder, fresh, len(ids) - len(fresh), chunk, speed)
            token = choose(logits[0, -1, : tokenizer.vocab_size])
            speed.note(len(fresh), fresh is ids)
            if rules.ends(tokenizer, token):
                break
            fresh = [token]
            ids = ids + fresh
    return rules.decode(tokenizer, ids[len(begin) :])


def _compute(
    model: CPM, decoder: Decoder, fresh: list[int], start: int, chunk: int | None, speed: Speed
) -> Tensor:
    """Return the logits of the last of some tokens, (1, any, V). They begin at position `start`."""
    device = model.norm.weight.device
    tokens = torch.tensor([fresh], device=device)
    # a chunk cannot have fewer tokens than ranks
    if start or len(fresh) < model.sp.size:
        return decoder(tokens)
    positions, logits = torch.arange(len(fresh), device=device), tokens
    for part in decoder.cache.prefill(len(fresh), chunk or _CHUNK):
        speed.alive(f"computing tokens {part.positions[0]} to {part.positions[1] - 1}")
        logits = model(part.shard(tokens), part.shard(positions, 0), cache=part)
    return logits


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
    decoder: BeeDecoder | AntDecoder, tokens: int, end: int, choose: Choose
) -> list[int]:
    """Return up to `tokens` more tokens. `choose` takes them from logits (V,), except `end`."""
    found: list[int] = []
    for _ in range(tokens):
        token = choose(decoder.logits)
        if token == end:
            break
        found.append(token)
        decoder.append(token)
    return found
