r"""Continue a text with a trained model, or fill in the texts under "<ans>" of an instance.

    python train/generate.py --run runs/cpm --prompt "def main(" --tokens 300 --temperature 0.8
    python train/generate.py --run runs/bee --prompt '{"question": "2 + 3", "<ans>": ""}' \
        --tokens 10 --temperature 0
    python train/generate.py --init-from FOLDER --processes 2 --dtype bf16 --chunk 16384 \
        --prompt-file book.txt

With several ranks, each has the whole model. They share the prompt, and the keys and values of all
tokens. Rank 0 chooses the tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script()

import torch
import torch.distributed as dist

from bmt_burst import init_sequence_parallel
from models.config import CPMConfig
from models.cpm import CPM
from models.cpm_live.layers import LiveModel
from train.base import ranks
from train.base.command_line import ArgumentParser, read_length
from train.checkpoints import checkpoint
from train.data.records import read_text
from train.data.tokenizer import Tokenizer
from train.generation.decoding import Choose, Generator, Sampling, Speed, TextRules, continue_text
from train.loop import resume
from train.registry import load
from train.run import ending
from train.run.distributed import choose_device, init_distributed, rank_timeout
from train.run.launch import launch
from train.run.watchdog import Watchdog, telling
from train.settings.config import TrainConfig
from train.settings.kinds import config_of, kind_of
from train.settings.options import add_options
from train.settings.settings import DTYPES, shared_options
from train.trained.model import check_source, checkpoint_tokenizer, open_trained, read_saved
from train.trained.texts import begin_token, folder_stops, lacking_tokens, run_stops

_PROGRAM = "generate.py"
_SHOWN = 12  # digits of the prompt's digest that are shown
_SHARED = {  # options of pretrain.py, too
    *("init_from", "model", "accept_field", "untie", "bos", "processes", "device", "timeout")
}


@torch.inference_mode()
def generate(
    model: CPM | LiveModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
    *,
    rules: TextRules | None = None,
    chunk: int | None = None,
    speed: Speed | None = None,
) -> str:
    """Return the prompt with up to `tokens` more tokens, by the model's generator (registry.py).

    If the model has several ranks, all call this, and rank 0 chooses the tokens. `rules`, `chunk`
    and `speed` are continue_text's. Raises ValueError for a prompt that the model cannot answer.
    """
    device = next(model.parameters()).device
    choose = sampling.on(device)
    if not isinstance(model, CPM):
        kind = kind_of(model.config)
        if model.sp.size > 1 or chunk is not None:
            raise ValueError(
                f"expected a dense CPM for --processes and --chunk, got a {kind.name}, whose "
                "attention has a bias"
            )
        answer: Generator = load(kind.generator)
        return answer(model, tokenizer, prompt, tokens, choose)
    choose = choose if model.sp.size == 1 else _share(choose, device)
    return continue_text(model, tokenizer, prompt, tokens, choose, rules, chunk, speed)


def _share(choose: Choose, device: torch.device) -> Choose:
    """Return a function that returns rank 0's choice on all ranks of the world."""

    def choose_together(logits: torch.Tensor) -> int:
        token = torch.zeros(1, dtype=torch.int64, device=device)
        if ranks.rank() == 0:
            token.fill_(choose(logits))
        dist.broadcast(token, 0)
        return int(token)

    return choose_together


def _parser() -> ArgumentParser:
    parser = ArgumentParser(_PROGRAM, __doc__)
    add = parser.add_argument
    add("--run", type=Path, help="the --output of a run, or one checkpoint in it")
    add(
        "--prompt",
        help="text to continue (default: none); for a CPM-Bee an instance as JSON, see the second "
        "example",
    )
    add("--prompt-file", type=Path, help="UTF-8 file with the text to continue")
    add(
        "--special",
        action="store_true",
        help="read names of special tokens in the prompt, as in a conversation, as these tokens, "
        "and print special tokens (default: they are letters of the text)",
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
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of the model (default: fp32)")
    add(
        "--chunk",
        type=read_length,
        metavar="TOKENS",
        help="compute the prompt in chunks of so many tokens, over all ranks (default: 64K)",
    )
    add_options(parser, _SHARED)
    return parser


@dataclass(frozen=True)
class _Request:
    """A checked command line. `given` are arguments of TrainConfig."""

    args: argparse.Namespace
    prompt: str
    given: dict[str, Any]
    config: TrainConfig
    sampling: Sampling

    @staticmethod
    def read(args: argparse.Namespace) -> _Request:
        """Check the options and read the prompt. Raises ValueError or OSError."""
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        if not 0 <= args.tokens < 2**31:
            raise ValueError(f"--tokens must be at least 0 and below 2^31, got {args.tokens}")
        given = {name: vars(args)[name] for name in _SHARED if name in args}
        check_source(args.run, given)
        if any("\ud800" <= letter <= "\udfff" for letter in args.prompt or ""):
            raise ValueError(f"--prompt must be in UTF-8, got {args.prompt!r}")
        if args.prompt is not None and args.prompt_file is not None:
            raise ValueError("give --prompt or --prompt-file, got both")
        if args.chunk is not None and args.chunk < 1:
            raise ValueError(f"--chunk must be at least 1, got {args.chunk}")
        config = TrainConfig(**given, engine="torch")
        prompt = read_text(args.prompt_file) if args.prompt_file else args.prompt or ""
        return _Request(args, prompt, given, config, sampling)

    @property
    def shared(self) -> dict[str, Any]:
        """The options that must be equal on all ranks, with a digest of the prompt."""
        args = self.args
        digest = hashlib.sha256(self.prompt.encode()).hexdigest()[:_SHOWN]
        own = {"run": args.run, "prompt": f"of digest {digest}", "tokens": args.tokens}
        own |= {"chunk": args.chunk, "dtype": args.dtype, "special": args.special}
        sampling = dataclasses.asdict(self.sampling)
        return shared_options({**self.config.to_dict(), **own, **sampling})

    def open(self, device: torch.device) -> tuple[CPM | LiveModel, Tokenizer, TextRules]:
        """Return the whole model on one device, its tokenizer and the rules of its texts."""
        dtype = DTYPES[self.args.dtype]
        if self.args.run:
            saved = checkpoint.Checkpoint(checkpoint.find(self.args.run))
            tokenizer = checkpoint_tokenizer(saved.path)
            rules = self._rules(saved, tokenizer)
            return read_saved(saved, device, dtype), tokenizer, rules
        trained = open_trained({**self.given, "dtype": self.args.dtype}, None, None, device)
        stops = folder_stops(trained.name, trained.tokenizer)
        longest = trained.model.longest_sequence
        lacking = lacking_tokens(trained.name, trained.tokenizer)
        rules = TextRules(trained.bos, stops, self.args.special, longest, lacking)
        return trained.read(device, dtype), trained.tokenizer, rules

    def _rules(self, saved: checkpoint.Checkpoint, tokenizer: Tokenizer) -> TextRules:
        """Return the rules of a run's texts. Warn if nothing can begin a text."""
        config, state, model = self.config, saved.state, config_of(saved.state["model"])
        if not isinstance(model, CPMConfig):
            if config.bos != "auto" or self.args.special:
                found = kind_of(model).name
                raise ValueError(f"--bos and --special are for a dense CPM, got a {found}")
            return TextRules()
        bos, began = begin_token(config, saved.path, tokenizer), resume.saved_begin_token(state)
        masked = resume.saved_documents(state) == "mask"
        if bos is None and began is None and not self.prompt and masked:
            ranks.warn(
                "this model was trained without begin tokens (--bos) and cannot begin a text: give "
                "a --prompt"
            )
        longest = max(resume.longest_row(state), model.longest_sequence or 0)
        return TextRules(bos, run_stops(state, tokenizer), self.args.special, longest)

    def answer(
        self, model: CPM | LiveModel, tokenizer: Tokenizer, rules: TextRules, speed: Speed
    ) -> None:
        """Print the answer, and the speed at which a dense CPM computed it."""
        given = self.prompt, self.args.tokens, self.sampling
        text = generate(model, tokenizer, *given, rules=rules, chunk=self.args.chunk, speed=speed)
        ranks.say(text)
        if said := str(speed):
            ranks.warn(said)


def _work(request: _Request, watchdog: Watchdog) -> None:
    """Answer on one of several ranks."""
    watchdog.alive("waiting for the other ranks to join")
    device = init_distributed(request.config, request.shared)
    sp = init_sequence_parallel(timeout=rank_timeout(request.config))
    watchdog.alive("reading weights")
    model, tokenizer, rules = ranks.together(lambda: request.open(device))
    model.attach(sp)
    ranks.together(lambda: request.answer(model, tokenizer, rules, Speed(watchdog.alive)))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    try:
        request = _Request.read(parser.parse_args(argv))
        config = request.config
        if "RANK" not in os.environ and config.processes == 1:
            device = choose_device(config.device)
            with telling("reading weights"):
                opened = request.open(device)
            with telling("computing the text"):
                request.answer(*opened, Speed())
            return 0
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        parser.fail(error)
    if "RANK" not in os.environ:
        return launch([__file__, *argv], config.processes)
    watchdog = Watchdog(ranks.rank(), config.timeout, _PROGRAM)
    return ending.run_rank(lambda: _work(request, watchdog), watchdog)


if __name__ == "__main__":
    ending.run_script(main)
