"""Turns text into tokens on disk that pretraining reads memory-mapped.

    python train/prepare_data.py --input corpus.jsonl more_text/ --output data/corpus --val-fraction 0.01

Inputs are .txt files (one document each), .jsonl files (one document a line, in --field) or folders of them. Writes
OUTPUT/train and, with a validation share, OUTPUT/val; see train/data.py for the format. Text streams through: files
may be larger than memory, a line may not; a long .txt is tokenized in pieces of some MiB that end with a line. Lines
that are not UTF-8, not JSON or lack the field are skipped, counted and reported; index.json lists the first of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

if __name__ == "__main__":  # run as a script: Python put this folder first in the path, the repository belongs there
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.text import BadLines, find_files, read_documents
from train.tokenizer import Tokenizer, open_tokenizer


class TokenWriter:
    """Writes one folder of tokens; the index comes last, so a folder with an index is whole."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        folder.mkdir(parents=True)
        self.tokens = self.documents = 0
        self._token_file = open(folder / "tokens.bin", "wb")
        self._document_file = open(folder / "documents.bin", "wb")

    def write(self, document: Iterator[str]) -> None:
        """Appends a document that comes in pieces of text, and eos. A document without text leaves no trace."""
        start = self.tokens
        for text in document:
            self._append(self.tokenizer.encode(text))
        if self.tokens > start:
            self._append([self.tokenizer.eos_id])
            self._document_file.write(np.int64(start).tobytes())
            self.documents += 1

    def finish(self, sources: list[str], bad: BadLines) -> None:
        for file in (self._token_file, self._document_file):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self.tokenizer.save(self.folder)
        index = {
            "tokens": self.tokens,
            "documents": self.documents,
            "dtype": self.tokenizer.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "sources": sources,
            "bad_lines": bad.count,
            "first_bad_lines": bad.first,
        }
        with open(self.folder / "index.json", "w") as file:
            file.write(json.dumps(index, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _append(self, ids) -> None:
        self._token_file.write(np.asarray(ids, dtype=self.tokenizer.dtype).tobytes())
        self.tokens += len(ids)


def _is_validation(name: str, fraction: float) -> bool:
    """Whether a document goes to the validation part; depends on its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < fraction * 2**64


def _check_output(output: Path, overwrite: bool, files: list[Path]) -> None:
    """Refuses to replace anything but what this script wrote."""
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if not (output / "train" / "index.json").is_file():
        raise ValueError(f"{output} was not written by prepare_data.py and is not replaced")
    if inside := [path for path in files if output.resolve() in path.resolve().parents]:
        raise ValueError(f"input {inside[0]} lies in {output}, which would be replaced")


def prepare(args: argparse.Namespace) -> None:
    tokenizer = open_tokenizer(args.tokenizer)
    files = find_files(args.input, args.glob, args.exclude)
    output = Path(args.output)
    _check_output(output, args.overwrite, files)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    writers = {"train": TokenWriter(partial / "train", tokenizer)}
    if args.val_fraction:
        writers["val"] = TokenWriter(partial / "val", tokenizer)
    bad = BadLines()
    with tqdm(total=sum(f.stat().st_size for f in files), unit="B", unit_scale=True, desc="tokenizing") as bar:
        for path in files:
            for name, document in read_documents(path, args.field, bad, bar.update):
                part = "val" if _is_validation(name, args.val_fraction) else "train"
                writers[part].write(document)
    for part, writer in writers.items():
        if not writer.tokens:
            raise ValueError(
                f"the {part} part got no tokens from {len(files)} files; {bad.count} bad lines {bad.first}"
            )
        writer.finish(args.input, bad)
    if output.exists():
        shutil.rmtree(output)
    partial.rename(output)
    for part, writer in writers.items():
        print(f"{output / part}: {writer.tokens:,} tokens in {writer.documents:,} documents")
    if bad.count:
        print(f"{bad.count} bad lines were skipped, the first:", *bad.first[:5], sep="\n  ", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help=".txt or .jsonl files, or folders")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output folder")
    parser.add_argument(
        "--tokenizer", default="bytes", help="'bytes' (default), a tokenizer.json or a SentencePiece .model"
    )
    parser.add_argument("--field", default="text", help="field of .jsonl records that holds the text (default: text)")
    parser.add_argument("--glob", help="in folders, take files of this pattern, as text unless they end in .jsonl")
    parser.add_argument(
        "--exclude", nargs="*", default=[], help="in folders, leave out folders and files of these names"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.0, help="share of documents for validation (default: 0)"
    )
    args = parser.parse_args()
    try:
        if not 0 <= args.val_fraction < 1:
            raise ValueError(f"--val-fraction must be at least 0 and below 1, got {args.val_fraction}")
        prepare(args)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_data.py: {error}")


if __name__ == "__main__":
    main()
