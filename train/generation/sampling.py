"""Sampling of tokens, and the contract of generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Choose = Callable[[Tensor], int]  # a token from logits (V,)


class Generator(Protocol):
    """A function that answers a prompt with one kind of model."""

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: str,
        tokens: int,
        choose: Choose,
        bos: int | None = None,
    ) -> str:
        """Return the prompt with up to `tokens` more tokens for each text, which `choose` takes.
        `bos` is the begin token of training, if any. Raises ValueError if there is no answer.
        """


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
    _check_sampling(temperature, top_k, top_p, seed)
    generator = torch.Generator(device).manual_seed(seed)
    return lambda logits: _sample(logits.float(), temperature, top_k, top_p, generator)


def _check_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature must be finite and not negative, got {temperature}")
    if top_k < 0:
        raise ValueError(f"--top-k must not be negative, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {seed}")


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
