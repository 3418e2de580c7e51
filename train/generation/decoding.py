"""Decoding with a cache of keys and values, on one rank or several.

The given tokens are computed once, as in training, and for them the logits of the last one only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_burst import Cache, Decoder
from models.cpm import CPM
from train.base import ranks
from train.base.wording import counted
from train.data.tokenizer_base import Tokenizer

_CHUNK = 1 << 16  # tokens of a prompt: hidden states of a longer one would take most of the memory
_TICK = 1.0  # seconds between signs of life, at least
_SHOWN = 5  # names of a message

Choose = Callable[[Tensor], int]  # a token from logits (V,)
# returns the prompt with more tokens, of (model, tokenizer, prompt, most tokens, Choose)
Generator = Callable[[Any, Any, str, int, Choose], str]


@dataclass(frozen=True)
class Sampling:
    """The choice of tokens. Temperature 0 is greedy. Tokens are among the top_k most likely ones
    (0: all), and among the fewest of these with a total probability of top_p. Raises ValueError for
    settings out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            got = self.temperature
            raise ValueError(f"--temperature must be finite and not negative, got {got}")
        if self.top_k < 0:
            raise ValueError(f"--top-k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2^63, got {self.seed}")

    def on(self, device: torch.device | str) -> Choose:
        """Return a function that chooses a token from logits (V,) on a device."""
        generator = torch.Generator(device).manual_seed(self.seed)
        return lambda logits: self._choose(logits.float(), generator)

    def _choose(self, logits: Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        # the most likely token gets 0 at any temperature
        logits = (logits.double() - logits.max()) / self.temperature
        probs, tokens = logits.softmax(-1).sort(descending=True)
        if self.top_k:
            probs = probs[: self.top_k]
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= self.top_p * probs.sum(), 0.0)
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
        self._since = time.perf_counter()

    def note(self, tokens: int, are_prompt: bool) -> None:
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


@dataclass(frozen=True)
class TextRules:
    """The rules by which a model's texts begin and end.

    bos      the token in front of a text, or None
    stops    the tokens that end a text. If there are none, the tokenizer's end-of-text token does
    special  whether names of special tokens in a prompt are these tokens, and are printed
    longest  tokens of the longest text that the model was made for; None: not known
    lacking  names of tokens of the model that the tokenizer lacks
    """

    bos: int | None = None
    stops: frozenset[int] = frozenset()
    special: bool = False
    longest: int | None = None
    lacking: tuple[str, ...] = ()

    def encode(self, tokenizer: Tokenizer, prompt: str) -> tuple[list[int], list[int]]:
        """Return the tokens in front of a prompt, and its own. A prompt that starts with `bos` gets
        no second one. Without `bos`, an empty prompt gets the end-of-text token.
        """
        read = tokenizer.encode_special if self.special else tokenizer.encode
        ids = [int(token) for token in read(prompt)]
        if self.bos is not None:
            return ([] if ids[:1] == [self.bos] else [self.bos]), ids
        return ([] if ids else [tokenizer.eos_id]), ids

    def ends(self, tokenizer: Tokenizer, token: int) -> bool:
        return token in self.stops if self.stops else token == tokenizer.eos_id

    def decode(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        return tokenizer.decode_special(ids) if self.special else tokenizer.decode(ids)

    def warn(self, tokenizer: Tokenizer, prompt: str, read: int, tokens: int) -> None:
        """Warn of special tokens in a prompt that are read as letters, and of too many tokens."""
        spelled = [name for name in tokenizer.special_names() if name in prompt]
        if spelled and not self.special:
            ranks.warn(
                "the prompt spells special tokens, which are read as letters: "
                f"{_shorten(spelled)}; --special reads them as tokens"
            )
        if lacking := [name for name in self.lacking if name in prompt]:
            ranks.warn(
                "the prompt spells tokens that the tokenizer's file lacks, which are read as "
                f"letters: {_shorten(lacking)}; AutoTokenizer.from_pretrained(FOLDER)"
                ".save_pretrained(FOLDER) of transformers writes them into its tokenizer.json"
            )
        if self.longest is not None and read + tokens > self.longest:
            ranks.warn(
                f"the prompt's {counted(read, 'token')} and --tokens {tokens:,} are beyond the "
                f"{self.longest:,} tokens that the model was made for: give a shorter prompt or "
                "fewer --tokens"
            )


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


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
