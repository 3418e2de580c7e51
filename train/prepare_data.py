r"""Turn text into tokens on disk, which pretrain.py reads.

    python train/prepare_data.py --input corpus.jsonl more_text/ --output data/corpus \
        --val-fraction 0.01

It writes OUTPUT/train and, with a validation share, OUTPUT/val. OUTPUT is whole or does not exist.
docs/data.md lists the inputs. Files may be larger than memory, but a line may not. With --stream it
only names the inputs, and pretrain.py tokenizes them while it trains.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script()

from tqdm import tqdm

from train.base.command_line import ArgumentParser, read_length
from train.base.folders import write_aside
from train.base.parallel import map_in_order
from train.base.signals import INTERRUPTED, Interrupts
from train.base.wording import counted
from train.data.end_of_text import describe_end, named_ends
from train.data.files import MEGATRON, TextFile
from train.data.find import add_inputs, check_holds_text, find_files
from train.data.records import BadLines, BrokenShards
from train.data.stored import DataWriter, make_writer
from train.data.stream_files import StreamFiles, find_streamed
from train.data.text import Document, Encoded, Encoder, find_broken, make_reader, read_pieces
from train.data.tokenizer import Tokenizer, open_tokenizer

_SMALL = 1 << 23  # bytes of text below which starting processes takes longer than it saves
_SHUFFLED = 1 << 22  # tokens of a stream
_PARTS = {"train", "val"}


def _is_validation(name: str, fraction: float) -> bool:
    """Whether the document of this name is for validation."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") < fraction * 2**64


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


def _remove_old(output: Path, interrupts: Interrupts) -> None:
    """Make room for the new folder. From here on the run cannot be interrupted."""
    interrupts.end()
    if output.exists():
        shutil.rmtree(output)


def _documents(
    results: Iterator[Encoded], lines: BadLines, shards: BrokenShards, bar: tqdm
) -> Iterator[tuple[Document, Iterator]]:
    """Yield each document with its ids in parts. Read these before the next document."""

    def parts() -> Iterator[tuple]:
        for result in results:
            lines.extend(result.bad)
            yield from result.documents
            if result.damage:
                shards.add(result.file, result.damage)
            bar.update(result.size)

    for document, pieces in itertools.groupby(parts(), key=lambda part: part[0]):
        yield document, (ids for _, ids in pieces)


def _tokenize(
    files: list[TextFile],
    args: argparse.Namespace,
    writers: dict[str, DataWriter],
    interrupts: Interrupts,
    shards: BrokenShards,
) -> BadLines:
    """Write every document to its part. Return the bad lines."""
    size = sum(file.path.stat().st_size for file in files)
    text = sum(file.path.stat().st_size for file in files if file.kind != MEGATRON)
    encoder = functools.partial(Encoder.open, args.tokenizer, args.field, args.eos)
    pieces = (piece for file in files for piece in read_pieces(file, args.field))
    workers = args.workers
    if workers is None:  # one for little work, else one a core
        few = args.tokenizer == "bytes" or text < _SMALL
        workers = 1 if few else len(os.sched_getaffinity(0))
    results = map_in_order(encoder, pieces, workers)
    lines = BadLines()
    with closing(results), tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing") as bar:
        for document, ids in _documents(results, lines, shards, bar):
            interrupts.check()
            part = "val" if _is_validation(document.name, args.val_fraction) else "train"
            writers[part].write(ids)
    lines.check(args.max_bad)
    if not any(each.tokens for each in writers.values()):
        raise ValueError(f"got no tokens from {counted(len(files), 'file')}: {lines.summary()}")
    return lines


def _split(
    writers: dict[str, DataWriter], tokenizer: Tokenizer, fraction: float
) -> dict[str, DataWriter]:
    """Split the only part that has tokens: its last `fraction` is for validation, or ValueError."""
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
    for each in writers.values():
        each.folder = each.folder.rename(each.folder.with_name(f"{each.folder.name}-whole"))
    parts = {name: make_writer(whole.folder.with_name(name), tokenizer) for name in writers}
    parts["train"].copy(whole, 0, trained)
    parts["val"].copy(whole, trained, whole.units)
    for each in writers.values():
        shutil.rmtree(each.folder)
    few = counted(whole.documents, "document is too little", "documents are too few")
    print(f"{few} to choose from: the last {whole.unit} are for validation", file=sys.stderr)
    return parts


def _print_end(tokenizer: Tokenizer) -> None:
    """Print the token that ends documents, and the files that name others."""
    file, name_of = tokenizer.file, tokenizer.name_of
    named = {} if file is None else named_ends(file.parent, name_of)
    print(describe_end(name_of(tokenizer.eos_id), named))


def prepare(args: argparse.Namespace, interrupts: Interrupts) -> None:
    files, unread = find_files(args.input, args.glob, args.exclude, args.format)
    given = next((file for file in files if file.kind == MEGATRON), None)
    if args.tokenizer is None and given:
        raise ValueError(f"{given.path} holds tokens: --tokenizer must name the one that made them")
    args.tokenizer = "bytes" if args.tokenizer is None else args.tokenizer
    tokenizer = open_tokenizer(args.tokenizer, args.eos)
    if tokenizer.instances:
        check_holds_text(files, f"data for {tokenizer.instances}")
    else:
        _print_end(tokenizer)
    shards, output = BrokenShards(args.max_bad_shards), Path(args.output)
    with write_aside(output) as partial:
        _check_output(output, args.overwrite, files)
        unread.report()
        files = find_broken(files, make_reader(tokenizer, args.field).field, shards)
        names = ["train", "val"] if args.val_fraction else ["train"]
        writers = {name: make_writer(partial / name, tokenizer) for name in names}
        lines = _tokenize(files, args, writers, interrupts, shards)
        if not all(each.tokens for each in writers.values()):
            writers = _split(writers, tokenizer, args.val_fraction)
        for each in writers.values():
            each.finish(
                sources=args.input,
                bad_lines=lines.count,
                first_bad_lines=lines.first,
                broken_shards=shards.found,
                left_out_characters=lines.left_out,
                not_read=unread.lines(),
            )
        _remove_old(output, interrupts)
    kind = "instance" if tokenizer.instances else "document"
    for name, each in writers.items():
        held = f"{counted(each.tokens, 'token')} in {counted(each.documents, kind)}"
        print(f"{output / name}: {held}")
    lines.report()
    shards.report()


def prepare_stream(args: argparse.Namespace, interrupts: Interrupts) -> None:
    """Write a folder that lists the inputs, so that pretrain.py reads them."""
    files, checked, unread = find_streamed(args.input, args.glob, args.exclude, args.format)
    tokenizer = open_tokenizer(args.tokenizer or "bytes", args.eos)
    if tokenizer.instances:
        raise ValueError(f"--stream is for documents, not for {tokenizer.instances}")
    _print_end(tokenizer)
    output, shards = Path(args.output), BrokenShards(args.max_bad_shards)
    with write_aside(output) as partial:
        _check_output(output, args.overwrite, [file for file, _ in files])
        unread.report()
        left_out = {*checked} - {*find_broken(checked, args.field, shards)}
        stream = StreamFiles(
            tuple((file, size) for file, size in files if file not in left_out),
            *(args.field, args.shuffle_tokens, args.max_bad, args.max_bad_shards, args.format),
        )
        notes = {"broken_shards": shards.found, "not_read": unread.lines()}
        stream.write(partial / "train", tokenizer, sources=args.input, **notes)
        _remove_old(output, interrupts)
    size = sum(size for _, size in stream.files)
    print(f"{output / 'train'}: a stream of {counted(len(stream.files), 'file')}, {size:,} bytes")
    shards.report()


def _parser() -> ArgumentParser:
    parser = ArgumentParser("prepare_data.py", __doc__)
    add = parser.add_argument
    add_inputs(parser, "also tables, tokens of Megatron-LM and, with --stream, addresses")
    add("--output", required=True, help="folder to write")
    add("--overwrite", action="store_true", help="replace an existing output folder")
    add(
        "--tokenizer",
        help="'bytes' (default), a tokenizer.json, a SentencePiece .model; cpm-bee:FILE, "
        "cpm-ant:FILE or cpm-ant-greedy:FILE with a vocabulary, for instances of these models",
    )
    add(
        "--eos",
        metavar="TOKEN",
        help="end-of-text token of a .json or .model (default: a special token of a usual name, or "
        "a model's own)",
    )
    add(
        "--field",
        default="text",
        help="field of JSON records, or column of tables, that holds the text (default: text); "
        "data.text for field text of the object data, unless a field has this very name",
    )
    add(
        "--stream",
        action="store_true",
        help="write no tokens, but a folder that names the inputs: .jsonl, .json and .parquet "
        "files, folders of datasets, and addresses such as hf://datasets/NAME/*.parquet",
    )
    add(
        "--shuffle-tokens",
        type=read_length,
        metavar="TOKENS",
        help=f"tokens of a --stream that are shuffled at once, in memory (default: {_SHUFFLED})",
    )
    add(
        "--val-fraction",
        type=float,
        default=0.0,
        help="share of documents for validation (default: 0)",
    )
    add(
        "--max-bad",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="largest share of bad lines among the lines that are not empty (default: 0.01)",
    )
    add(
        "--max-bad-shards",
        type=int,
        default=0,
        metavar="FILES",
        help="most compressed files, tables and JSON arrays that may be broken (default: 0)",
    )
    add("--workers", type=int, help="processes that tokenize (default: one for each CPU core)")
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
        parser.exit(INTERRUPTED, "prepare_data.py: interrupted, nothing was written\n")


if __name__ == "__main__":
    main()
