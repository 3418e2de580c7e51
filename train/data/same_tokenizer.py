"""Checks that data, checkpoints and weights have one tokenizer. Older ones only get a warning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from models.tensor_files import folder_of
from train.base import ranks
from train.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer, saved_identity
from train.data.tokenizer_base import SPEC

_FILES = ("tokenizer.json", "tokenizer.model")  # as other programs name them
_SHOWN = 12  # digits of an identity that are shown


def check_folder(
    data: Path, other: Path, name: Path | str, data_name: Path | str | None = None
) -> None:
    """Raise ValueError unless both folders have one tokenizer. Errors use their names."""
    data_name = data_name or data
    expected, found = saved_identity(data), saved_identity(other)
    if expected is None or found is None:
        _warn_of_missing(data_name if expected is None else name)
    elif expected != found:
        raise ValueError(
            f"{name} has another tokenizer than {data_name}: expected {expected[:_SHOWN]}, "
            f"got {found[:_SHOWN]}"
        )


def check_weights(
    data: Path, tokenizer: Tokenizer, weights: Path, allowed: bool, grows: bool = False
) -> str | None:
    """Return why ids of the weights' tokenizer mean nothing to that of `data`, or None.

    `tokenizer`, the data's, is compared with each one next to the weights. Raises ValueError if all
    differ, unless it has more tokens and the vocabulary `grows`. If `allowed`, this is a warning.
    """
    expected, found = tokenizer.identity, list(find_tokenizers(folder_of(weights), tokenizer.eos))
    if not found:
        _warn_of_missing(weights)
        return "it has no tokenizer.json or tokenizer.model to compare with the run's tokenizer"
    others = [other for _, other in found if isinstance(other, Tokenizer)]
    has_theirs = any(extends(tokenizer, other) for other in others)
    foreign = None if has_theirs else "the run has another tokenizer"
    if any(expected == other.identity for other in others) or (grows and has_theirs):
        return foreign
    shown = [
        f"{other.identity[:_SHOWN]} {where}" if isinstance(other, Tokenizer) else other
        for where, other in found
    ]
    problem = (
        f"{weights} has another tokenizer than {data}: expected {expected[:_SHOWN]}, "
        f"got {', '.join(shown)}"
    )
    if grows:
        problem += f"; the tokenizer of {data} does not have all its tokens under the same ids"
    if not allowed:
        raise ValueError(
            f"{problem}; give data that was made with its tokenizer, or --allow-other-tokenizer"
        )
    ranks.warn(problem)
    return foreign


def find_tokenizers(folder: Path, eos: str | None) -> Iterator[tuple[str, Tokenizer | str]]:
    """Yield each tokenizer of a folder, export.py's first, with its place, or why it is broken."""
    if (folder / SPEC).is_file():
        yield "as it was exported", load_tokenizer(folder)
    for name in _FILES:
        if (folder / name).is_file():
            yield f"of {name}", _open(folder / name, eos)


def _open(file: Path, eos: str | None) -> Tokenizer | str:
    problem = ""
    for name in dict.fromkeys((eos, None)):
        try:
            return open_tokenizer(str(file), name)
        except ValueError as error:
            problem = problem or str(error)
    return problem


def extends(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Whether `tokenizer` has all tokens of `other`, under the same ids."""
    return other.identity == tokenizer.identity or (
        other.vocab_size <= tokenizer.vocab_size
        and all(other.name_of(i) == tokenizer.name_of(i) for i in range(other.vocab_size))
    )


def _warn_of_missing(folder: Path | str) -> None:
    only = "only the size of the vocabulary is checked"
    ranks.warn(f"{folder} has no identity of its tokenizer: {only}")
