"""Generation with a dense CPM: it continues a text."""

from __future__ import annotations

import torch

from models.cpm import CPM
from train.data.tokenizer_base import Tokenizer
from train.generation.decoding import Cache
from train.generation.sampling import Choose


def continue_text(
    model: CPM,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    choose: Choose,
    bos: int | None = None,
) -> str:
    """Return the prompt and up to `tokens` more tokens, fewer if the model ends the text.

    The model reads begin token `bos` in front of the prompt. Without `bos`, it reads the
    end-of-text token for an empty prompt.

    Rotary scalings that depend on the length use the length of the text so far, as in transformers.
    Tokens beyond the original length are rotated differently, and earlier ones are not rotated
    again.

    Raises ValueError if there is not enough memory.
    """
    device = model.norm.weight.device
    begin = [] if bos is None else [bos]
    ids = [*begin, *(int(i) for i in tokenizer.encode(prompt))] or [tokenizer.eos_id]
    cache = Cache(model.config, len(ids) + tokens, model.norm.weight)
    fresh = ids
    for _ in range(tokens):
        positions = torch.arange(len(ids) - len(fresh), len(ids), device=device)
        logits = model(torch.tensor([fresh], device=device), positions, cache=cache)[
            0, -1, : tokenizer.vocab_size
        ]
        token = choose(logits)
        if token == tokenizer.eos_id:
            break
        fresh = [token]
        ids = ids + fresh
    return tokenizer.decode(ids[len(begin) :])
