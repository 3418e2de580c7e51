r"""Continue a text with a trained model, or fill in the texts under "<ans>" of an instance.

    python train/generate.py --run runs/cpm --prompt "def main(" --tokens 300 --temperature 0.8
    python train/generate.py --run runs/bee --prompt '{"question": "2 + 3", "<ans>": ""}' \
        --tokens 10 --temperature 0
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from models.cpm import CPM
from models.cpm_live.layers import LiveModel
from train.base.command_line import ArgumentParser
from train.checkpoints import checkpoint, resume
from train.cpm_live import generate as cpm_live
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.generation.decoding import Cache
from train.run.kinds import config_of, kind_of


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> CPM | LiveModel:
    """Return the model of a checkpoint folder, whole, on one device."""
    saved = checkpoint.Checkpoint(path)
    config = config_of(saved.state["model"])
    with torch.device("meta"):
        model = kind_of(config).model(config)
    weights = {name: w.to(device, dtype) for name, w in saved.weights().items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def checkpoint_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder: its own, or its run's."""
    own = path / checkpoint.TOKENIZER
    return load_tokenizer(own if own.is_dir() else path.parent / checkpoint.TOKENIZER)


@torch.inference_mode()
def generate(
    model: CPM,
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
    """Return the prompt and up to `tokens` more tokens, fewer if the model ends the text.
    Temperature 0 is greedy.

    The model reads begin token `bos` in front of the prompt. Without `bos`, it reads the
    end-of-text token for an empty prompt.

    Rotary scalings that depend on the length use the length of the text so far, as in transformers.
    Tokens beyond the original length are rotated differently, and earlier ones are not rotated
    again.

    Raises ValueError for settings out of range, or if there is not enough memory.
    """
    _check_sampling(tokens, temperature, top_k, top_p, seed)
    device = model.norm.weight.device
    choose = sampler(device, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    begin = [] if bos is None else [bos]
    ids = [*begin, *(int(i) for i in tokenizer.encode(prompt))] or [tokenizer.eos_id]
    cache = Cache(model.config, len(ids) + tokens, model.norm.weight)
    fresh = ids
    for _ in range(tokens):
        positions = torch.arange(len(ids) - len(fresh), len(ids), device=device)
        logits = model(torch.tensor([fresh], device=device), positions, cache=cache)[
            0, -1, : tokenizer.vocab_size
        ]
        token = choose(logits)
        if token == tokenizer.eos_id:
            break
        fresh = [token]
        ids = ids + fresh
    return tokenizer.decode(ids[len(begin) :])


def _answer(answer: Callable) -> Callable:
    """Return a function that answers a prompt with one of CPM-Live's models. `answer` gets a
    function that chooses a token from logits.
    """

    def answered(
        model: LiveModel, tokenizer: Tokenizer, prompt: str, tokens: int, **sampling
    ) -> str:
        choose = sampler(model.input_embedding.weight.device, **sampling)
        return answer(model, tokenizer, prompt, tokens, choose)

    return answered


# The function of each kind of models: (model, tokenizer, prompt, tokens, sampling) to text.
ANSWERS = {
    "cpm": generate,
    "cpm-bee": _answer(cpm_live.fill_in),
    "cpm-ant": _answer(cpm_live.continue_text),
}


def sampler(
    device: torch.device,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Callable[[Tensor], int]:
    """Return a function that chooses a token from logits (V,) on a device. Settings are those of
    `generate`.
    """
    _check_sampling(0, temperature, top_k, top_p, seed)
    generator = torch.Generator(device).manual_seed(seed)
    return lambda logits: _sample(logits.float(), temperature, top_k, top_p, generator)


def _check_sampling(tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if not 0 <= tokens < 2**31:
        raise ValueError(f"--tokens must be at least 0 and below 2^31, got {tokens}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature must be finite and not negative, got {temperature}")
    if top_k < 0:
        raise ValueError(f"--top-k must not be negative, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2^63, got {seed}")


def _sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Choose a token from logits (V,), among the top_k most likely ones, and among the fewest of
    these with a total probability of top_p.
    """
    if temperature == 0:
        return int(logits.argmax())
    # the most likely token gets 0, however small the temperature is
    logits = (logits.double() - logits.max()) / temperature
    probs, tokens = logits.softmax(-1).sort(descending=True)
    if top_k:
        probs = probs[:top_k]
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p * probs.sum(), 0.0)
    return int(tokens[torch.multinomial(probs, 1, generator=generator)])


def _begin_token(path: Path, prompt: str) -> int | None:
    """Return the begin token of a checkpoint's run. Warn if `prompt` is empty and training never
    began a text.
    """
    state = checkpoint.Checkpoint(path).state
    bos = resume.saved_begin_token(state)
    if bos is None and not prompt and resume.saved_documents(state) == "mask":
        print(
            "this model was trained without begin tokens (--bos) and cannot begin a text: give a "
            "--prompt",
            file=sys.stderr,
        )
    return bos


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="generate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        help="the --output of a training run, or one checkpoint in it",
    )
    parser.add_argument(
        "--prompt",
        default="",
        help="text to continue (default: none); for a CPM-Bee an instance as JSON, see the second "
        "example",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        help="most tokens to add to each text (default: 200)",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="sample from the k most likely tokens; 0: all (default)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the most likely tokens with total probability p (default: 0.95)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    args = parser.parse_args(argv)
    sampling = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
    }
    try:
        _check_sampling(args.tokens, **sampling)
        path = checkpoint.find(args.run)
        tokenizer = checkpoint_tokenizer(path)
        model = load_model(path, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        kind = kind_of(model.config).name
        if kind == "cpm":
            sampling["bos"] = _begin_token(path, args.prompt)
        print(ANSWERS[kind](model, tokenizer, args.prompt, args.tokens, **sampling))
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        parser.fail(error)


if __name__ == "__main__":
    main()
