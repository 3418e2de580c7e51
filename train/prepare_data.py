r"""Turn text into tokens on disk, which pretrain.py reads.

    python train/prepare_data.py --input corpus.jsonl more_text/ --output data/corpus \
        --val-fraction 0.01

Inputs are .txt files (one document each), .jsonl and .json files (one document a record, in
--field), all also as .gz or .zst, .parquet files (one document a row, in column --field), folders
that datasets.Dataset.save_to_disk wrote, and folders of all these. Other files of a folder, and
files that are named twice, are counted and reported. The extra "data" has the packages that read
.zst files (zstandard) and tables (pyarrow).

The content of a file decides whether it has a JSON record a line or is one JSON array of records,
and a file of another ending is read as records too if it holds them. A .txt of JSON is refused.
--format says how to read files, instead of their content. In folders, hidden files and descriptions
such as dataset_info.json are no data. --field data.text means field text in the object data, unless
a field has this very name.

Megatron-LM's PREFIX.bin and PREFIX.idx are read too. Their tokens are kept. So --tokenizer must
name the tokenizer that made them.

With --stream the script only names the inputs in OUTPUT/train, and pretrain.py reads and tokenizes
them while it trains.

The script writes OUTPUT/train and, with a validation share, OUTPUT/val. Each has tokens, with the
tokenizer's eos after each document, and the place where each document starts, so that pretrain.py
can keep documents apart. train/data/folder.py describes the files.

With a vocabulary of CPM-Live (--tokenizer cpm-bee:FILE, cpm-ant:FILE), lines are instances of these
models, as train/cpm_live/instances.py describes them.

Files may be larger than memory, but a line may not. A long .txt is tokenized in parts of a few MiB
that end with a line. --workers processes share the work, and the result does not depend on their
number. Lines that are not UTF-8, not JSON, or lack the field are skipped, counted and reported.
index.json lists the first of them. If more than --max-bad of the lines are bad, nothing is written.

A broken shard is a compressed file, table or JSON array that ends early or is damaged. The text
before the damage is kept, the rest is skipped, and the shard is named. If there are more than
--max-bad-shards, nothing is written.

A document's name alone decides whether it is for validation. The name is the path of its file
relative to its --input. For a file that is itself an --input, it is the file's own name. Lines of
JSON add the line, an array the record, a table the row, and a .bin the document. So a corpus that
is moved or copied gets the same split. With few documents, one part may be empty. The last tokens
are then for validation, and a document may be cut in two.

OUTPUT appears when it is complete. Until then the run works in OUTPUT.partial, which it locks. This
folder is removed after Ctrl-C and errors. If the run is killed, the next run replaces it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.base.command_line import ArgumentParser
from train.base.lock import lock
from train.base.parallel import map_in_order
from train.base.signals import Interrupts
from train.base.wording import counted
from train.data.files import MEGATRON, TextFile, check_holds_text, find_files
from train.data.forms import FORMATS
from train.data.stored import DataWriter, make_writer
from train.data.stream_files import StreamFiles, find_streamed
from train.data.text import (
    BadLines,
    BrokenShards,
    Document,
    Encoded,
    Encoder,
    find_broken,
    make_reader,
    read_parts,
)
from train.data.tokenizer import Tokenizer, open_tokenizer

_SMALL = 1 << 23  # bytes of text below which starting processes takes longer than it saves
_SHUFFLED = 1 << 22  # tokens of a stream
_PARTS = {"train", "val"}


def _is_validation(name: str, fraction: float) -> bool:
    """Whether the document of this name is for validation."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < fraction * 2**64


def _check_tokenizer(args: argparse.Namespace, files: list[TextFile]) -> None:
    """Take bytes if no tokenizer is given. Raise ValueError if an input holds tokens."""
    given = next((file for file in files if file.kind == MEGATRON), None)
    if args.tokenizer is None and given:
        raise ValueError(f"{given.path} holds tokens: --tokenizer must name the one that made them")
    args.tokenizer = "bytes" if args.tokenizer is None else args.tokenizer


def _check_output(output: Path, overwrite: bool, files: list[TextFile]) -> None:
    """Raise ValueError unless the output is new, or a folder of this script to be replaced."""
    if output.is_symlink():
        raise ValueError(
            f"{output} is a link, which is not replaced: give the folder that it points to"
        )
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if not (output / "train" / "index.json").is_file():
        raise ValueError(f"{output} was not written by prepare_data.py and is not replaced")
    paths = (file.path for file in files)
    if inside := [path for path in paths if output.resolve() in path.resolve().parents]:
        raise ValueError(f"input {inside[0]} lies in {output}, which would be replaced")
    if others := sorted({path.name for path in output.iterdir()} - _PARTS):
        raise ValueError(
            f"{output} holds files that prepare_data.py did not write, and is not replaced: "
            f"{others[0]}"
        )


@contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    """Yield a folder beside `output` for this run alone, and remove it afterwards. Raises
    ValueError if another run has it.
    """
    folder = output.with_name(output.name + ".partial")
    if folder.is_symlink() or (
        folder.is_dir() and any(folder.iterdir()) and not (folder / ".lock").exists()
    ):
        raise ValueError(
            f"this run would work in {folder}, which prepare_data.py did not write: remove it"
        )
    try:
        with lock(folder) as held:
            if not Path(held.name).exists() or not os.path.samestat(
                os.fstat(held.fileno()), os.stat(held.name)
            ):
                raise ValueError(f"{output} was finished by another run just now")
            try:
                _empty(folder)  # a run that was killed may have left files
                yield folder
            finally:
                _empty(folder)
                os.unlink(held.name)
    finally:
        # fails if another run has the folder, or has taken it since the lock was released
        with suppress(OSError):
            folder.rmdir()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def _workers(asked: int | None, tokenizer: str, size: int) -> int:
    """Return the number of worker processes: as asked, else one for each CPU core, or one in all
    for little work.
    """
    if asked is not None:
        return asked
    return 1 if tokenizer == "bytes" or size < _SMALL else len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Bad:
    """All that could not be used: lines, and the rest of broken shards."""

    lines: BadLines
    shards: BrokenShards


def _documents(
    results: Iterator[Encoded], bad: _Bad, bar: tqdm, interrupts: Interrupts
) -> Iterator[tuple[Document, Iterator]]:
    """Yield each document with its ids in parts. Read these before the next document."""

    def parts() -> Iterator[tuple]:
        for result in results:
            interrupts.check()
            bad.lines.extend(result.bad)
            yield from result.documents
            if result.damage:
                bad.shards.add(result.file, result.damage)
            bar.update(result.size)

    for document, pieces in itertools.groupby(parts(), key=lambda part: part[0]):
        yield document, (ids for _, ids in pieces)


def _tokenize(
    files: list[TextFile],
    args: argparse.Namespace,
    writers: dict[str, DataWriter],
    interrupts: Interrupts,
    bad: _Bad,
) -> None:
    """Write every document to its part. `bad` gets what could not be used."""
    size = sum(file.path.stat().st_size for file in files)
    text = sum(file.path.stat().st_size for file in files if file.kind != MEGATRON)
    encoder = functools.partial(Encoder.open, args.tokenizer, args.field, args.eos)
    pieces = (piece for file in files for piece in read_parts(file, args.field))
    results = map_in_order(encoder, pieces, _workers(args.workers, args.tokenizer, text))
    with closing(results), tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing") as bar:
        for document, ids in _documents(results, bad, bar, interrupts):
            part = "val" if _is_validation(document.name, args.val_fraction) else "train"
            writers[part].write(ids)


def _split(
    folder: Path, writers: dict[str, DataWriter], tokenizer: Tokenizer, fraction: float
) -> dict[str, DataWriter]:
    """Split the only part that has tokens. The last `fraction` of them is for validation.

    Instances are split the same way. Raises ValueError if there are too few.
    """
    for each in writers.values():
        each.close()
    whole = max(writers.values(), key=lambda each: each.tokens)
    least, least_for_validation = whole.fewest
    if whole.units < least + least_for_validation:
        raise ValueError(
            f"{counted(whole.units, whole.unit[:-1])} cannot be divided into training and "
            f"validation"
        )
    trained = min(
        max(round(whole.units * (1 - fraction)), least), whole.units - least_for_validation
    )
    parts = {name: make_writer(folder / "split" / name, tokenizer) for name in writers}
    parts["train"].copy(whole, 0, trained)
    parts["val"].copy(whole, trained, whole.units)
    few = counted(whole.documents, "document is too little", "documents are too few")
    print(
        f"{few} to choose from: the last {whole.unit} are for validation",
        file=sys.stderr,
    )
    return parts


def prepare(args: argparse.Namespace, interrupts: Interrupts) -> None:
    files, unread = find_files(args.input, args.glob, args.exclude, args.format)
    _check_tokenizer(args, files)
    tokenizer = open_tokenizer(args.tokenizer, args.eos)
    if tokenizer.instances:
        check_holds_text(files, f"data for {tokenizer.instances}")
    bad = _Bad(BadLines(), BrokenShards(args.max_bad_shards))
    output = Path(args.output)
    with _partial_folder(output) as partial:
        _check_output(output, args.overwrite, files)
        for line in unread.lines():
            print(f"not read: {line}", file=sys.stderr)
        files = find_broken(files, make_reader(tokenizer, args.field).field, bad.shards)
        names = ["train", "val"] if args.val_fraction else ["train"]
        writers = {name: make_writer(partial / "new" / name, tokenizer) for name in names}
        _tokenize(files, args, writers, interrupts, bad)
        bad.lines.check(args.max_bad)
        if not any(each.tokens for each in writers.values()):
            raise ValueError(
                f"got no tokens from {counted(len(files), 'file')}: {bad.lines.summary()}"
            )
        if not all(each.tokens for each in writers.values()):
            writers = _split(partial, writers, tokenizer, args.val_fraction)
        notes = {
            "sources": args.input,
            "bad_lines": bad.lines.count,
            "first_bad_lines": bad.lines.first,
            "broken_shards": bad.shards.found,
            "left_out_characters": bad.lines.left_out,
            "not_read": unread.lines(),
        }
        for each in writers.values():
            each.finish(**notes)
        _replace(output, partial, interrupts)
    for name, each in writers.items():
        kind = "instance" if tokenizer.instances else "document"
        print(
            f"{output / name}: {counted(each.tokens, 'token')} in {counted(each.documents, kind)}"
        )
    _print_bad(bad)


def prepare_stream(args: argparse.Namespace, interrupts: Interrupts) -> None:
    """Write a folder that lists the inputs, so that pretrain.py reads them."""
    files, checked, unread = find_streamed(args.input, args.glob, args.exclude, args.format)
    tokenizer = open_tokenizer(args.tokenizer or "bytes", args.eos)
    if tokenizer.instances:
        raise ValueError(f"--stream is for documents, not for {tokenizer.instances}")
    output, broken = Path(args.output), BrokenShards(args.max_bad_shards)
    with _partial_folder(output) as partial:
        _check_output(output, args.overwrite, [file for file, _ in files])
        for line in unread.lines():
            print(f"not read: {line}", file=sys.stderr)
        left_out = {*checked} - {*find_broken(checked, args.field, broken)}
        stream = StreamFiles(
            tuple((file, size) for file, size in files if file not in left_out),
            *(args.field, args.shuffle_tokens, args.max_bad, args.max_bad_shards, args.format),
        )
        notes = {"broken_shards": broken.found, "not_read": unread.lines()}
        stream.write(partial / "new" / "train", tokenizer, sources=args.input, **notes)
        _replace(output, partial, interrupts)
    size = sum(size for _, size in stream.files)
    print(f"{output / 'train'}: a stream of {counted(len(stream.files), 'file')}, {size:,} bytes")
    _print_bad(_Bad(BadLines(), broken))


def _replace(output: Path, partial: Path, interrupts: Interrupts) -> None:
    """Move the new folder in `partial` to `output`."""
    interrupts.end()
    if output.exists():
        output.rename(partial / "replaced")
    new = next(path for path in (partial / "split", partial / "new") if path.exists())
    new.rename(output)


def _print_bad(bad: _Bad) -> None:
    """Print what could not be used."""
    lines, shards = bad.lines, bad.shards.found
    if lines.left_out:
        lacking = counted(
            lines.left_out,
            "character that the vocabulary lacks was left out",
            "characters that the vocabulary lacks were left out",
        )
        print(lacking, file=sys.stderr)
    if lines.count:
        skipped = counted(lines.count, "bad line was skipped", "bad lines were skipped")
        print(f"{skipped}, the first:", *lines.first[:5], sep="\n  ", file=sys.stderr)
    if shards:
        skipped = counted(len(shards), "broken shard was skipped", "broken shards were skipped")
        print(f"{skipped} from the damage on:", *shards, sep="\n  ", file=sys.stderr)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help=".txt, .jsonl or .json files, also as .gz or .zst, .parquet files, folders of "
        "datasets.Dataset.save_to_disk, Megatron's .bin with its .idx, or folders of all these",
    )
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing output folder"
    )
    parser.add_argument(
        "--tokenizer",
        help="'bytes' (default), a tokenizer.json, a SentencePiece .model; cpm-bee:FILE, "
        "cpm-ant:FILE or "
        "cpm-ant-greedy:FILE with a vocabulary, for instances of these models",
    )
    parser.add_argument(
        "--eos",
        metavar="TOKEN",
        help="the end-of-text token of a .json or .model (default: its own, or one of the usual "
        "names)",
    )
    parser.add_argument(
        "--field",
        default="text",
        help="field of JSON records, or column of tables, that holds the text (default: text); "
        "data.text for field text of the object data",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="what files hold, except tables and tokens: a JSON record a line (lines), one JSON "
        "array of records (array), or plain text, also if it is JSON (text). The default, auto, "
        "looks at their content",
    )
    parser.add_argument(
        "--glob",
        help="in folders, read the files that match this pattern, as plain text unless they hold "
        "JSON records or are .parquet",
    )
    parser.add_argument(
        "--exclude",
        nargs="*",
        default=[],
        help="in folders, skip folders and files with these names",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="write no tokens, but a folder that names the inputs: pretrain.py reads and tokenizes "
        "them while it trains. Inputs are .jsonl, .json and .parquet files, folders of datasets, "
        "and addresses of such files, such as hf://datasets/NAME/*.parquet",
    )
    parser.add_argument(
        "--shuffle-tokens",
        type=int,
        metavar="TOKENS",
        help="with --stream: tokens that are in memory at once to be shuffled (default: 4194304)",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        help="share of documents for validation (default: 0)",
    )
    parser.add_argument(
        "--max-bad",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="largest share of bad lines among the lines that are not empty; if more are bad, "
        "nothing is written (default: 0.01)",
    )
    parser.add_argument(
        "--max-bad-shards",
        type=int,
        default=0,
        metavar="FILES",
        help="most compressed files, tables and JSON arrays that may end early or be damaged; the "
        "rest of each is skipped. If more do, nothing is written (default: 0)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that tokenize (default: one for each CPU core, but 1 for bytes or little "
        "text)",
    )
    return parser


def _check_stream(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """End the process with a message if options do not go with --stream or its absence."""
    if args.stream and args.val_fraction:
        parser.error("--val-fraction does not go with --stream: prepare files for validation alone")
    if args.stream and args.workers is not None:
        parser.error("--workers does not go with --stream, which tokenizes nothing")
    if not args.stream and args.shuffle_tokens is not None:
        parser.error("--shuffle-tokens needs --stream")
    if args.shuffle_tokens is None:
        args.shuffle_tokens = _SHUFFLED
    if args.shuffle_tokens < 1:
        parser.error(f"--shuffle-tokens must be at least 1, got {args.shuffle_tokens}")


def _check_arguments(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """End the process with a message if an argument is out of range."""
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    if not args.output:
        parser.error("--output must not be empty")
    if not 0 <= args.max_bad <= 1:
        parser.error(f"--max-bad must be at least 0 and at most 1, got {args.max_bad}")
    _check_stream(parser, args)
    if args.max_bad_shards < 0:
        parser.error(f"--max-bad-shards must not be negative, got {args.max_bad_shards}")
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val-fraction must be at least 0 and below 1, got {args.val_fraction}")


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    _check_arguments(parser, args)
    try:
        (prepare_stream if args.stream else prepare)(args, Interrupts())
    except (ValueError, OSError) as error:
        parser.fail(error)
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted, nothing was written", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
