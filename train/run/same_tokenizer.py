"""Checks that data, checkpoints and weights have the same tokenizer. Each stores its identity.

Folders that were written before tokenizers had an identity are not refused. A warning says so, and
only the size of the vocabulary is compared with the model's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from models.tensor_files import folder_of
from train.base import ranks
from train.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer, saved_identity

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # as other programs name them
_SHOWN = 12  # digits of an identity that are shown


def check_folder(
    data: Path, other: Path, name: Path | str, data_name: Path | str | None = None
) -> None:
    """Raise ValueError unless folder `other` has the same tokenizer as folder `data`. The error
    calls them `name` and `data_name`.
    """
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
) -> None:
    """Raise ValueError if the weights belong to another tokenizer than the folder `data`.

    `weights` is a folder or a file of weights, and `tokenizer` is the data's tokenizer. It is
    compared with each tokenizer beside the weights: the one that export.py saved, and those in
    files with the usual names. If the vocabulary `grows`, it may have more tokens than one of them.
    If none matches and `allowed` is set, a warning is printed instead.
    """
    expected, folder = saved_identity(data), folder_of(weights)
    identities, said = _tokenizers_in(folder, tokenizer.eos)
    if expected is None or not said:
        _warn_of_missing(data if expected is None else weights)
    elif expected not in identities and not (grows and _extends(tokenizer, folder)):
        problem = (
            f"{weights} has another tokenizer than {data}: expected {expected[:_SHOWN]}, "
            f"got {', '.join(said)}"
        )
        if grows:
            problem += f"; the tokenizer of {data} does not have all its tokens under the same ids"
        if not allowed:
            raise ValueError(
                f"{problem}; give data that was made with its tokenizer, or --allow-other-tokenizer"
            )
        _warn(problem)


def _extends(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether a tokenizer has all tokens of one of those in a folder, under the same ids."""
    return any(
        old.vocab_size <= tokenizer.vocab_size
        and all(old.name_of(i) == tokenizer.name_of(i) for i in range(old.vocab_size))
        for old in _open_tokenizers(folder, tokenizer.eos)
    )


def _open_tokenizers(folder: Path, eos: str | None) -> Iterator[Tokenizer]:
    """Yield the tokenizers in a folder, without broken ones."""
    if saved_identity(folder):
        yield load_tokenizer(folder)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            with suppress(ValueError):  # _tokenizers_in describes it
                yield open_tokenizer(str(folder / name), eos)


def _tokenizers_in(folder: Path, eos: str | None) -> tuple[set[str], list[str]]:
    """Return the identities of the tokenizers in a folder, and a description of each, including
    broken ones.

    `eos` is the end-of-text token for tokenizers that other programs saved.
    """
    identities, said = set(), []
    if saved := saved_identity(folder):
        identities, said = {saved}, [f"{saved[:_SHOWN]} as it was exported"]
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            try:
                found = open_tokenizer(str(folder / name), eos).identity
            except ValueError as error:
                said.append(str(error))
            else:
                identities.add(found)
                said.append(f"{found[:_SHOWN]} of {name}")
    return identities, said


def _warn_of_missing(folder: Path | str) -> None:
    _warn(f"{folder} has no identity of its tokenizer: only the size of the vocabulary is checked")


def _warn(text: str) -> None:
    if ranks.rank() == 0:
        print(text, file=sys.stderr)
