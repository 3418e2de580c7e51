"""Running prepare_data.py in the process of a test, and reading what it wrote."""

from __future__ import annotations

import io
import itertools
import json
import signal
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from train import prepare_data
from train.data.folder import TokenFile
from train.data.stored import TokenWriter, make_writer
from train.data.text import make_reader
from train.data.tokenizer import ByteTokenizer
from train.data.tokenizer_base import Tokenizer

EOS = ByteTokenizer.eos_id


def prepare(*arguments, code: int = 0) -> str:
    """Run prepare_data.py. Return its output.

    At its end it ignores interrupts, because its process usually ends with it.
    """
    printed, before, on_interrupt = io.StringIO(), sys.argv, signal.getsignal(signal.SIGINT)
    sys.argv = ["prepare_data.py", *map(str, arguments)]
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            prepare_data.main()
    except SystemExit as end:
        assert end.code == code, printed.getvalue()
    else:
        assert code == 0, printed.getvalue()
    finally:
        sys.argv = before
        signal.signal(signal.SIGINT, on_interrupt)
    return printed.getvalue()


def write_tokens(folder: Path, tokenizer: Tokenizer, *texts: str) -> Path:
    """Write a folder of tokens with these texts as documents. Return it."""
    return write_documents(folder, map(tokenizer.encode, texts), tokenizer)


def write_documents(
    folder: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer | None = None
) -> Path:
    """Write a folder of documents of tokens, by default those of bytes. Return it."""
    writer = TokenWriter(folder, tokenizer or ByteTokenizer())
    for document in documents:
        writer.write([document])
    writer.finish()
    return folder


def write_instances(folder: Path, tokenizer: Tokenizer, *lines: object) -> Path:
    """Write a folder of CPM-Live's instances that are made of lines of data. Return it."""
    writer, reader = make_writer(folder, tokenizer), make_reader(tokenizer, "text")
    for line in lines:
        writer.write([reader.of_record(line)])
    writer.finish()
    return folder


def edit_index(folder: Path, *unhashed: str, **fields) -> None:
    """Change fields of a folder's index.json, where None removes one. Remove hashes of files."""
    index = json.loads((folder / "index.json").read_text()) | fields
    for file in unhashed:
        index["sha256"].pop(file, None)
    kept = {name: value for name, value in index.items() if value is not None}
    (folder / "index.json").write_text(json.dumps(kept))


def documents(folder: Path) -> list[list[int]]:
    """Return the documents of a folder of tokens, by documents.bin."""
    file = TokenFile(folder)
    starts = [*np.fromfile(folder / "documents.bin", dtype=np.int64), len(file.tokens)]
    return [file.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]


def texts(folder: Path) -> list[str]:
    """Return the documents of a folder of byte tokens as text."""
    return [bytes(token for token in ids if token != EOS).decode() for ids in documents(folder)]


def jsonl(*records: str) -> bytes:
    """Return lines of JSON with these texts."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in records)
