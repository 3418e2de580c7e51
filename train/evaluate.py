r"""Evaluate a trained model on long texts: needles, chains of variables, perplexity by position.

    python train/evaluate.py --run runs/8b --processes 2 --sp-size 2 --lengths 4096,32768
    python train/evaluate.py --init-from FOLDER --tasks needle --dtype bf16 --lengths 4096
    torchrun --nproc-per-node 8 -- train/evaluate.py --run runs/8b --sp-size 8 --lengths 1048576

An answer's tokens are scored in one pass over the text, which is cut over --sp-size ranks. It is
found if each of its tokens is the most likely one. results.json and a picture for each task are
written into a folder, which is printed. The folder is whole or does not exist.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As a script, Python puts this folder first in the path. Put the repository there instead.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.base.signals import begin_script

    begin_script()

from train.base import ranks
from train.base.command_line import ArgumentParser, read_length
from train.base.folders import write_aside
from train.checkpoints import checkpoint
from train.data.batches import Batches
from train.data.folder import Sequences
from train.data.records import read_text
from train.data.shares import evaluated_folders, validation_folders
from train.evaluation import tasks
from train.evaluation.before import TABLE, Before
from train.evaluation.retrieval import SENTENCES
from train.evaluation.tasks import Grid, Result, Subject, write_report
from train.loop.building import make_engine, make_groups
from train.loop.inputs import warn_of_length
from train.run import ending
from train.run.distributed import init_distributed
from train.run.launch import launch
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig, check_layers
from train.settings.options import SourcesAction, add_options
from train.settings.settings import shared_options
from train.trained.model import Trained, check_source, open_trained

_PROGRAM = "evaluate.py"
_SHARED = {  # options of pretrain.py that have the same meaning here
    *("model", "init_from", "accept_field", "allow_other_tokenizer", "untie", "dtype"),
    *("documents", "bos", "seq_len", "micro_batch_size", "eval_sequences"),
    *("processes", "sp_size", "strategy", "inner_size", "ulysses_size", "layout"),
    *("engine", "device", "flash", "deterministic", "timeout", "mlp_tile", "chunk"),
}


def _numbers(kind: Callable[[str], Any]) -> Any:
    """Return a function that reads "1,2,4" as a tuple of numbers."""

    def read(text: str) -> tuple:
        try:
            return tuple(kind(part) for part in text.split(","))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(
                f"expected numbers with commas between them, got {text!r}"
            ) from error

    return read


def _parser() -> ArgumentParser:
    parser = ArgumentParser(_PROGRAM, __doc__, allow_abbrev=False)
    add = parser.add_argument_group("the evaluation").add_argument
    add("--run", type=Path, help="the --output of a training run, or one checkpoint in it")
    add(
        "--tasks",
        help="needle: retrieval by depth and length; variables: chains of assignments, by hops and "
        "length; positions: perplexity by position in --data (default: all)",
    )
    add(
        "--output",
        type=Path,
        help="folder to write; must not exist. By default a new evaluation_STEP in the folder of "
        "the run, or a new evaluation_FOLDER in runs/ for --init-from FOLDER",
    )
    add(
        "--before",
        type=Path,
        metavar="FOLDER",
        help="an earlier evaluation, such as that of the folder that the run began from: its "
        "tasks, lengths, texts and dtype are taken, and a table has both",
    )
    add(
        "--data",
        action=SourcesAction,
        nargs="+",
        metavar="PATH",
        help="for positions: folder of tokens, from prepare_data.py; or several, each as NAME=PATH "
        "(default: the run's validation data, else its training data)",
    )
    add("--tokenizer", help="a tokenizer as for prepare_data.py (default: the model's own)")
    add(
        "--text",
        help="file of the text in which something is hidden (default: built-in sentences in random "
        "order)",
    )
    add(
        "--lengths",
        type=_numbers(read_length),
        help="tokens of these texts and of sequences of --data, as in 4K,32K (default: texts "
        "of a quarter, a half and all of --seq-len, sequences of --seq-len)",
    )
    add("--depths", type=_numbers(float), help="where the needle is (default: 0,0.25,0.5,0.75,1)")
    add("--hops", type=_numbers(int), help="hops of the chain of variables (default: 1,2,4)")
    add(
        "--needles",
        type=int,
        dest="hidden",
        metavar="NEEDLES",
        help="needles, or chains of variables, in a text; one is asked for (default: 1)",
    )
    add("--digits", type=int, help="digits of the hidden numbers (default: 5)")
    add(
        "--samples",
        type=int,
        help="texts for each length and each depth or number of hops (default: 5)",
    )
    add("--bins", type=int, help="ranges of positions (default: 16)")
    add("--seed", type=int, help="seed of the texts (default: 0)")
    add_options(parser, _SHARED)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options: `data` as folders by name, `tasks` by name, those of Grid, `grid`, and
    those of TrainConfig, `settings`, as far as they were given.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    sizes = {field.name for field in dataclasses.fields(Grid)}
    own = {name: given.pop(name) for name in ("run", "output", "tokenizer")}
    try:
        before = Before.read(folder) if (folder := given.pop("before")) else None
        if before:
            before.fill(given, {field.name for field in dataclasses.fields(TrainConfig)})
        named, data = given.pop("tasks") or ",".join(tasks.TASKS), given.pop("data")
        own |= {"before": before, "text": given.pop("text")}
        grid = {name: given.pop(name) for name in sizes}
        grid = {name: value for name, value in grid.items() if value is not None}
        check_source(own["run"], given)
        if not 0 <= grid.get("seed", 0) < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2^63, got {grid['seed']}")
        folders = None if data is None else evaluated_folders(data)
        names = tasks.parse_tasks(named, "--tasks")
        request = argparse.Namespace(tasks=names, data=folders, grid=grid, settings=given, **own)
        if own["run"] is None and "positions" in names and data is None:
            raise ValueError(
                "--tasks positions needs text: give --data FOLDER, or --tasks needle,variables"
            )
        Grid(**{"lengths": (1,), **grid})  # checks the sizes before anything is started
        _take_lengths(grid.get("lengths"), given)
        TrainConfig(**given)
    except ValueError as error:
        parser.fail(error)
    return request


def _take_lengths(lengths: tuple[int, ...] | None, settings: dict[str, Any]) -> None:
    """Let --lengths decide --seq-len. Raises ValueError if both or none give a length."""
    if lengths is None:
        if "init_from" in settings and "seq_len" not in settings:
            raise ValueError("--init-from needs a length: give --lengths, as in 4096,32768")
        return
    if "seq_len" in settings:
        raise ValueError("--lengths are those of all tasks: leave out --seq-len")
    fewest = settings.get("sp_size", 1)
    if min(lengths) < fewest:
        raise ValueError(f"--lengths must be at least --sp-size {fewest}, got {min(lengths)}")
    settings["seq_len"] = max(lengths)


def _find_shared(request: argparse.Namespace) -> dict[str, Any]:
    """Return the options that must be equal on all ranks."""
    own = {name: getattr(request, name) for name in ("run", "data", "tasks")}
    own["text"] = request.text and Path(request.text)
    own |= {"tokenizer": request.tokenizer and Path(request.tokenizer), **request.grid}
    own["needles"] = own.pop("hidden", None)
    if "lengths" in request.grid:
        own["seq_len"] = None  # it follows from them
    return shared_options({**TrainConfig(**request.settings).to_dict(), **own})


class Evaluation:
    """One rank of an evaluation."""

    def __init__(self, request: argparse.Namespace, watchdog: Watchdog):
        self.request, self.watchdog = request, watchdog
        watchdog.alive("waiting for the other ranks to join")
        device = init_distributed(TrainConfig(**request.settings), _find_shared(request))
        watchdog.alive("choosing a checkpoint")
        path = checkpoint.find(request.run) if request.run else None
        self.folders: dict[str, str] = {}  # of the task positions, by the names of sources
        self.trained: Trained = ranks.together(
            lambda: open_trained(request.settings, path, request.tokenizer, device)
        )
        config, model = self.trained.config, self.trained.model
        # a micro-batch for each data parallel group
        size, groups = config.micro_batch_size or 1, max(1, ranks.world_size() // config.sp_size)
        self.config = dataclasses.replace(config, micro_batch_size=size, batch_size=size * groups)
        ranks.on_first(self._check_output)
        sp = ranks.together(lambda: make_groups(self.config))
        self.grid = ranks.together(self._choose_grid)
        watchdog.alive("building the model")
        engine = make_engine(self.config, model, sp, device, trains=False)
        text = request.text
        self.text = ranks.together(lambda: read_text(Path(text)) if text else SENTENCES)
        self.subject: Subject = ranks.together(
            lambda: Subject(
                engine,
                lambda length: Batches(self._of_length(length), model, sp, device),
                self.trained.tokenizer,
                self.trained.bos,
                self._open_data() if "positions" in request.tasks else {},
                watchdog.alive,
                self.text,
            )
        )
        if before := request.before:
            ranks.together(lambda: before.check_texts(self._describe_texts()))
        ranks.together(lambda: tasks.check_tasks(request.tasks, self.subject, self.grid))
        watchdog.alive("reading weights")
        ranks.together(lambda: self.trained.load(engine))

    def run(self) -> None:
        """Run the tasks and write the report."""
        results = []
        for name in self.request.tasks:
            results.append(tasks.evaluate(name, self.subject, self.grid))
            for line in results[-1].describe():
                ranks.say(line)
        self.watchdog.alive("writing the report")
        ranks.on_first(lambda: self._write(results))

    def _write(self, results: Sequence[Result]) -> None:
        about = {
            "model": self.trained.name,
            "ranks": ranks.world_size(),
            "sp_size": self.config.sp_size,
            "grid": dataclasses.asdict(self.grid),
            "options": self._describe_options(),
            "texts": self._describe_texts(),
        }
        output, before = self._choose_output(), self.request.before
        with write_aside(output) as folder:
            values = write_report(folder, about, results)
            if before:
                table = before.compare(self.trained.name, values["tasks"])
                (folder / TABLE).write_text(f"{table}\n")
                ranks.say(table)
        ranks.say(f"wrote {output}")

    def _describe_options(self) -> dict[str, Any]:
        """Return the options other than the grid that a comparison must repeat."""
        config, request = self.config, self.request
        absolute = {name: os.path.abspath(path) for name, path in self.folders.items()}
        return {
            "tasks": ",".join(request.tasks),
            "dtype": config.dtype,
            "eval_sequences": config.eval_sequences,
            "data": absolute.get("", absolute) or None,
            "text": request.text and os.path.abspath(request.text),
            **({} if "lengths" in request.grid else {"lengths": None, "seq_len": config.seq_len}),
        }

    def _describe_texts(self) -> dict[str, Any]:
        """Return what was read, without paths."""
        data = {
            str(length): {name: x.identity for name, x in sources.items()}
            for length, sources in self.subject.data.items()
        }
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"digest of --text": digest, "begin token": self.subject.bos, "data": data}

    def _of_length(self, length: int) -> TrainConfig:
        return dataclasses.replace(self.config, seq_len=length)

    def _choose_grid(self) -> Grid:
        """Return the sizes. Raises ValueError for lengths that cannot be cut over the ranks."""
        whole, fewest = self.config.seq_len, self.config.sp_size
        parts = dict.fromkeys(max(whole // part, fewest) for part in (4, 2, 1))
        grid = Grid(**{"lengths": tuple(parts), **self.request.grid})
        for length in {*grid.lengths, whole}:  # strategies and layers may refuse some
            check_layers(self._of_length(length), self.trained.model)
        given = "--lengths" if "lengths" in self.request.grid else "--seq-len"
        warn_of_length(self.config, self.trained.model, given)
        return grid

    def _check_output(self) -> None:
        """Make the folder around the report. Raises ValueError if the report exists, or cannot be
        written there.
        """
        output = self._choose_output()
        if os.path.lexists(output):
            raise ValueError(f"--output {output} exists: give another one")
        folder = output.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{folder} is not writable: give another --output")

    def _choose_output(self) -> Path:
        """Return --output, or a folder that does not exist."""
        if self.request.output is not None:
            return self.request.output
        source = (self.trained.path or Path(self.config.init_from or "")).resolve()
        named = source.with_name(f"evaluation_{source.name}")
        if self.trained.path is None:
            named = Path("runs", f"evaluation_{source.stem}")
        again = (named.with_name(f"{named.name}_{n}") for n in itertools.count(2))
        return next(x for x in itertools.chain([named], again) if not os.path.lexists(x))

    def _open_data(self) -> dict[int, dict[str, Sequences]]:
        """Open --data in sequences of each length, by default the run's own data."""
        folders = self.request.data
        if folders is None:
            assert self.trained.path is not None
            saved = checkpoint.Checkpoint(self.trained.path).state["config"]
            folders = validation_folders(saved.get("val_data")) or evaluated_folders(saved["data"])
            for folder in folders.values():
                if not Path(folder).is_dir():
                    raise ValueError(f"{folder}, the run's data, is not here: give --data")
        self.folders = folders
        lengths = dict.fromkeys(self.request.grid.get("lengths", (self.config.seq_len,)))
        shown, read = ", ".join(f"{length:,}" for length in lengths), ", ".join(folders.values())
        ranks.say(f"positions: sequences of {shown} tokens of {read}")
        return {
            length: {name: self.trained.open_data(at, length) for name, at in folders.items()}
            for length in lengths
        }


def main(argv: Sequence[str]) -> int:
    request = _parse(argv)
    processes = request.settings.get("processes", 1)
    if processes > 1 and "RANK" not in os.environ:
        return launch([__file__, *argv], processes)
    watchdog = Watchdog(ranks.rank(), TrainConfig(**request.settings).timeout, _PROGRAM)
    return ending.run_rank(lambda: Evaluation(request, watchdog).run(), watchdog)


if __name__ == "__main__":
    ending.run_script(main)
