"""Writes the weights of a training run for others, with its tokenizer.

    python train/export.py --run runs/cpm --output exported                     # as a Hugging Face folder
    python train/export.py --run runs/cpm --output exported --format bmtrain    # model.pt, as bmtrain.save writes it

`bmtrain.load(model, "exported/model.pt")` reads the latter, and pretrain.py --init-from both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

if __name__ == "__main__":  # run as a script: Python put this folder first in the path, the repository belongs there
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from models.config import CPMConfig
from models.huggingface import save_weights
from train import checkpoint
from train.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="--output of a training run, or one checkpoint in it")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--format", choices=("huggingface", "bmtrain"), default="huggingface")
    args = parser.parse_args()
    try:
        if args.output.exists():
            raise ValueError(f"{args.output} exists")
        path = checkpoint.find(args.run)
        saved = checkpoint.Checkpoint(path)
        if args.format == "bmtrain":
            args.output.mkdir(parents=True)
            torch.save(saved.weights(), args.output / "model.pt")
            (args.output / "model.json").write_text(json.dumps(saved.state["model"], indent=2) + "\n")
        else:
            save_weights(args.output, CPMConfig(**saved.state["model"]), saved.weights())
        load_tokenizer(path.parent / "tokenizer").save(args.output)
    except (ValueError, checkpoint.CheckpointError) as error:
        sys.exit(f"export.py: {error}")
    print(f"wrote {args.output} from {path}")


if __name__ == "__main__":
    main()
