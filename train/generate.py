r"""Continue a text with a trained model, or fill in the texts under "<ans>" of an instance.

    python train/generate.py --run runs/cpm --prompt "def main(" --tokens 300 --temperature 0.8
    python train/generate.py --run runs/bee --prompt '{"question": "2 + 3", "<ans>": ""}' \
        --tokens 10 --temperature 0
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from models.cpm import CPM
from models.cpm_live.layers import LiveModel
from train.base.command_line import ArgumentParser
from train.checkpoints import checkpoint
from train.data.tokenizer import Tokenizer
from train.generation.decoding import Generator, sampler
from train.registry import load
from train.run import resume
from train.run.kinds import config_of, kind_of
from train.run.trained import checkpoint_tokenizer


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> CPM | LiveModel:
    """Return the model of a checkpoint folder, whole, on one device."""
    saved = checkpoint.Checkpoint(path)
    config = config_of(saved.state["model"])
    with torch.device("meta"):
        model = load(kind_of(config).model)(config)
    weights = {name: w.to(device, dtype) for name, w in saved.weights().items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


@torch.inference_mode()
def generate(
    model: CPM | LiveModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    bos: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return the prompt with up to `tokens` more tokens, by the model's generator (registry.py).
    Raises ValueError for settings out of range, and for a prompt that it cannot answer.
    """
    _check_tokens(tokens)
    device = next(model.parameters()).device
    choose = sampler(device, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    answer: Generator = load(kind_of(model.config).generator)
    return answer(model, tokenizer, prompt, tokens, choose, bos)


def _check_tokens(tokens: int) -> None:
    if not 0 <= tokens < 2**31:
        raise ValueError(f"--tokens must be at least 0 and below 2^31, got {tokens}")


def _begin_token(path: Path, prompt: str) -> int | None:
    """Return the begin token of a checkpoint's run. Warn if nothing can begin a text."""
    state = checkpoint.Checkpoint(path).state
    bos = resume.saved_begin_token(state)
    if bos is None and not prompt and resume.saved_documents(state) == "mask":
        print(
            "this model was trained without begin tokens (--bos) and cannot begin a text: give a "
            "--prompt",
            file=sys.stderr,
        )
    return bos


def _parser() -> ArgumentParser:
    parser = ArgumentParser("generate.py", __doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="the --output of a run, or one checkpoint in it")
    add(
        "--prompt",
        default="",
        help="text to continue (default: none); for a CPM-Bee an instance as JSON, see the second "
        "example",
    )
    add("--tokens", type=int, default=200, help="most tokens to add to each text (default: 200)")
    add("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample from the k most likely tokens (default: all)")
    add(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the most likely tokens with total probability p (default: 0.95)",
    )
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    names = ("temperature", "top_k", "top_p", "seed")
    sampling = {name: getattr(args, name) for name in names}
    try:
        _check_tokens(args.tokens)
        sampler(torch.device("cpu"), **sampling)  # checks the settings before anything is read
        path = checkpoint.find(args.run)
        tokenizer = checkpoint_tokenizer(path)
        model = load_model(path, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        bos = _begin_token(path, args.prompt)
        print(generate(model, tokenizer, args.prompt, args.tokens, bos=bos, **sampling))
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        parser.fail(error)


if __name__ == "__main__":
    main()
