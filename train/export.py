"""Writes the weights of a training run for others, with its tokenizer.

    python train/export.py --run runs/cpm --output exported                     # as a Hugging Face
    folder python train/export.py --run runs/cpm --output exported --format bmtrain    # model.pt,
    as bmtrain.save writes it

A Hugging Face folder is one of a Llama (a Mistral, Qwen2 or Qwen3, if the model has what makes it
one, see models/hf_config.py), which transformers and what builds on it load by themselves:
MiniCPM's scalings are folded into the weights. With --keep-scalings it is a MiniCPM's instead, for
which transformers needs that model's own code (trust_remote_code), and with which training goes on
as it was. `bmtrain.load(model, "exported/model.pt")` reads the other format, and pretrain.py
--init-from all of them. CPM-Live's models are written in that one alone, under CPM-Live's names.

The folder is written under a hidden name beside --output and renamed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# run as a script: Python put this folder first in the path, the repository belongs there
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from models.config import CPMConfig
from models.huggingface import fold_scalings, round_weight, save_weights
from train.base.command_line import ArgumentParser
from train.base.lock import lock
from train.checkpoints import checkpoint, resume
from train.data.hf_tokenizer import save_for_transformers
from train.data.tokenizer import Tokenizer
from train.generate import checkpoint_tokenizer
from train.run.kinds import config_of, kind_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_huggingface(
    saved: checkpoint.Checkpoint,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype,
    keep_scalings: bool,
) -> None:
    """Writes config.json, weights and tokenizer as transformers reads them into `folder`, which
    exists.

    The tokenizer puts a begin token in front of a text if training did, and none is named if no
    text began after one.

    Raises OSError if that fails, ValueError if a weight is too large for the dtype or no model
    there is like this one.
    """
    config, weights = config_of(saved.state["model"]), saved.weights()
    if not isinstance(config, CPMConfig):
        raise ValueError(
            f"a {kind_of(config).name} has no Hugging Face format here: give --format bmtrain"
        )
    if not keep_scalings:
        config, weights = fold_scalings(config, weights)
    longest = max(resume.longest_row(saved.state), config.max_position_embeddings or 0)
    end, bos = tokenizer.eos_id, resume.saved_begin_token(saved.state)
    # Where documents are not told apart, the end of a text stands before the next. Otherwise
    # nothing does but `bos`.
    before = end if resume.saved_documents(saved.state) == "ignore" else bos
    ids = {"bos_token_id": before, "eos_token_id": end}
    save_weights(folder, config, weights, dtype, max_position_embeddings=longest, **ids)
    generation: dict[str, Any] = {**ids, "pad_token_id": end}
    if without_text := list(range(tokenizer.vocab_size, config.vocab_size)):
        generation["suppress_tokens"] = without_text
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    save_for_transformers(tokenizer, folder, longest, bos_id=before, add_bos=bos is not None)


def export_bmtrain(
    saved: checkpoint.Checkpoint, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype
) -> None:
    """Writes model.pt, model.json, which pretrain.py --model reads, and the tokenizer into
    `folder`, which exists.

    Raises OSError if that fails, ValueError if a weight is too large for the dtype.
    """
    weights = {name: round_weight(name, weight, dtype) for name, weight in saved.weights().items()}
    try:
        with open(folder / "model.pt", "wb") as file:
            torch.save(weights, file)
    except RuntimeError as error:  # torch's end of a file that could not be written
        raise OSError(
            f"could not write {folder / 'model.pt'}: {error.__context__ or error}"
        ) from error
    (folder / "model.json").write_text(json.dumps(saved.state["model"], indent=2) + "\n")
    tokenizer.save(folder)


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """A folder to write into that becomes `output`, which is not there yet, at the end; or goes
    away if the work fails.

    Raises ValueError if another process is writing it. What a kill left of an earlier try is
    removed.
    """
    output = Path(os.path.abspath(output))
    partial = output.with_name(f".{output.name}.partial")
    with lock(partial) as held:
        for leftover in partial.iterdir():
            if leftover.name != Path(held.name).name:
                leftover.unlink()
        try:
            yield partial
            Path(held.name).unlink()
            partial.rename(output)
        except BaseException:
            shutil.rmtree(partial)
            raise


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        help="--output of a training run, or one checkpoint in it",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write; must not exist"
    )
    parser.add_argument("--format", choices=("huggingface", "bmtrain"), default="huggingface")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="fp32",
        help="of the weights (default: fp32, exact)",
    )
    parser.add_argument(
        "--keep-scalings",
        action="store_true",
        help="write a MiniCPM with its scalings, not the Llama that equals it",
    )
    args = parser.parse_args(argv)
    if args.keep_scalings and args.format == "bmtrain":
        parser.error("--keep-scalings is for --format huggingface; bmtrain's always keeps them")
    dtype = DTYPES[args.dtype]
    try:
        if os.path.lexists(args.output):
            raise ValueError(f"{args.output} exists")
        path = checkpoint.find(args.run)
        saved, tokenizer = checkpoint.Checkpoint(path), checkpoint_tokenizer(path)
        with written_aside(args.output) as folder:
            if args.format == "bmtrain":
                export_bmtrain(saved, tokenizer, folder, dtype)
            else:
                export_huggingface(saved, tokenizer, folder, dtype, args.keep_scalings)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        parser.fail(error)
    print(f"wrote {args.output} from {path}")
    if args.keep_scalings:
        print(
            "transformers needs MiniCPM's own code for it (trust_remote_code); without --keep-scalings, nothing"
        )


if __name__ == "__main__":
    main()
