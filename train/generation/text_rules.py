"""The rules by which a model's texts begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from train.base import ranks
from train.base.wording import counted
from train.data.tokenizer_base import Tokenizer

_SHOWN = 5  # names of a message


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
