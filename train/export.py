"""Export the weights and the tokenizer of a training run.

    python train/export.py --run runs/cpm --output exported    # a Hugging Face folder
    python train/export.py --run runs/cpm --output exported --format bmtrain    # model.pt

docs/weights.md says which family a folder has, and what it takes over from --init-from FOLDER.
`bmtrain.load(model, "exported/model.pt")` reads the other format, as does pretrain.py --init-from.
CPM-Live's models are exported only so, under CPM-Live's names. A folder is whole or does not exist.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script()

import torch

from models.config import CPMConfig
from models.hf_config import config_to_hf
from models.hf_families import FAMILIES, keeps_scalings
from models.huggingface import fold_scalings, round_weight, save_weights
from train.base.command_line import ArgumentParser
from train.base.folders import write_aside
from train.base.signals import INTERRUPTED, Interrupts
from train.checkpoints import checkpoint
from train.checkpoints.beside import carry_over
from train.data.end_of_text import listed
from train.data.tokenizer import Tokenizer
from train.loop import resume
from train.run.watchdog import telling
from train.settings.kinds import config_of, kind_of
from train.settings.settings import DTYPES
from train.trained.hf_tokenizer import save_for_transformers
from train.trained.model import checkpoint_tokenizer


def export_huggingface(
    saved: checkpoint.Checkpoint,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype,
    keep_scalings: bool,
) -> list[str]:
    """Write config.json, weights and tokenizer for transformers into `folder`, which exists. Return
    notes for the user: what was taken over from --init-from, and the code that it needs.

    The tokenizer puts a begin token in front of a text if training did. Raises OSError, and
    ValueError if a weight is too large for the dtype, or if transformers has no such model.
    """
    config, weights = config_of(saved.state["model"]), saved.weights()
    if not isinstance(config, CPMConfig):
        raise ValueError(
            f"a {kind_of(config).name} has no Hugging Face format here: give --format bmtrain"
        )
    if not keep_scalings and not keeps_scalings(config):
        config, weights = fold_scalings(config, weights)
    longest = max(resume.longest_row(saved.state), config.max_position_embeddings or 0)
    end, bos = tokenizer.eos_id, resume.saved_begin_token(saved.state)
    # If documents are not kept apart, the end of a text precedes the next one. Otherwise only `bos`
    # does.
    before = end if resume.saved_documents(saved.state) == "ignore" else bos
    carried = carry_over(saved.state, tokenizer, before, config_to_hf(config, longest))
    of_model = listed(carried.config.get("eos_token_id"))
    stops = listed(carried.generation.get("eos_token_id", of_model))
    of_config = {**carried.config, "bos_token_id": before, "eos_token_id": _add(of_model, end)}
    save_weights(folder, config, weights, dtype, max_position_embeddings=longest, **of_config)
    generation = {"pad_token_id": end, **carried.generation, "bos_token_id": before}
    generation["eos_token_id"] = _add(stops, end)
    if without_text := list(range(tokenizer.vocab_size, config.vocab_size)):
        generation["suppress_tokens"] = without_text
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    settings = carried.tokenizer
    save_for_transformers(tokenizer, folder, longest, before, bos is not None, settings)
    carried.write_texts(folder)
    return [*carried.notes, *_describe_code(config)]


def _describe_code(config: CPMConfig) -> list[str]:
    """Return how transformers loads the model, if it needs code of its own."""
    kind = config_to_hf(config)["model_type"]
    if FAMILIES[kind].exported_code:
        why = "without --keep-scalings it needs none"
        if config.sparse:
            why = "no model of transformers has its sparse attention"
        return [f"transformers 5 loads it by the code in it (trust_remote_code=True); {why}"]
    if FAMILIES[kind].releases_code:
        return [
            f"no modelling file is written, and transformers has none of {kind}: to load it there, "
            "copy the release's *.py files into it, and auto_map of its config.json"
        ]
    return []


def _add(stops: list[int], end: int) -> int | list[int]:
    """Return stop tokens with the end of a text among them: one, or a list."""
    return end if set(stops) <= {end} else [*dict.fromkeys((*stops, end))]


def export_bmtrain(
    saved: checkpoint.Checkpoint, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype
) -> None:
    """Write model.pt, model.json and the tokenizer, or raise ValueError or OSError."""
    weights = {name: round_weight(name, weight, dtype) for name, weight in saved.weights().items()}
    try:
        with open(folder / "model.pt", "wb") as file:
            torch.save(weights, file)
    except RuntimeError as error:  # torch's error for a file that it could not finish
        raise OSError(
            f"could not write {folder / 'model.pt'}: {error.__context__ or error}"
        ) from error
    (folder / "model.json").write_text(json.dumps(saved.state["model"], indent=2) + "\n")
    bos = resume.saved_begin_token(saved.state)
    tokenizer.save(folder, begin=None if bos is None else tokenizer.name_of(bos))


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser("export.py", __doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="the --output of a run, or one checkpoint in it")
    add("--output", type=Path, required=True, help="folder to write; must not exist")
    add("--format", choices=("huggingface", "bmtrain"), default="huggingface")
    kinds = tuple(DTYPES)
    add("--dtype", choices=kinds, default="fp32", help="of the weights (default: fp32, exact)")
    add(
        "--keep-scalings",
        action="store_true",
        help="write a MiniCPM with its scalings, instead of an equivalent model without them",
    )
    args = parser.parse_args(argv)
    if args.keep_scalings and args.format == "bmtrain":
        parser.error("--keep-scalings is for --format huggingface; bmtrain always keeps them")
    dtype = DTYPES[args.dtype]
    try:
        if os.path.lexists(args.output):
            raise ValueError(f"{args.output} exists: give another --output")
        path = checkpoint.find(args.run)
        saved, tokenizer = checkpoint.Checkpoint(path), checkpoint_tokenizer(path)
        with write_aside(args.output) as folder, telling(f"writing {args.output}"):
            if args.format == "bmtrain":
                export_bmtrain(saved, tokenizer, folder, dtype)
                notes = []
            else:
                notes = export_huggingface(saved, tokenizer, folder, dtype, args.keep_scalings)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        parser.fail(error)
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "export.py: interrupted, nothing was written\n")
    print(f"wrote {args.output} from {path}", *notes, sep="\n")


if __name__ == "__main__":
    Interrupts()  # raises, so that what was written is removed
    main()
