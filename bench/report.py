"""Tables (Markdown, on stdout) and a plot (PNG, next to the results) of measured rows.

    python bench/report.py bench/results/attention-8-nvidia-h200-*.jsonl
    python bench/report.py --readme     # writes the pages of results, and the README's tables

The pages are docs/results.md, which has the headlines, and docs/results-TOPIC.md for each of
TOPICS. Each file of bench/results has a section on one of them.

In the README, this script writes the lines from `<!-- results: KIND of FILE -->` to `<!-- end -->`.
To show another file there, change FILE, and run this script with --readme.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import tables
from bench.other_tables import bitwise_table, other_tables, sparse_training_table, whole_table
from bench.plot import plot, several_lengths
from bench.tables import Row, UnfitRow, read_rows

_ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = _ROOT / "bench/results", _ROOT / "docs"


class Section(NamedTuple):
    """A section of a page, for the files of one measurement."""

    topic: str
    title: str
    command: str
    note: str = ""


_TWO_HOSTS = "A double ring: two halves of a host, with a slow link between them"
_MEDIANS = "medians over steps"
# Names of files -> their section. The first pattern that fits counts.
SECTIONS = {
    "attention-*-masks*": Section("masks", "Packed documents and windows", "bash bench/bench.sh"),
    "attention-*-strategies*": Section(
        "attention",
        "Four GPUs: strategies and peers",
        "bench/attention.py",
        "calls that take more than a second are measured once; the kernel aten is torch's "
        "FlashAttention-2, which stands in for flash-attn 2",
    ),
    "attention-*": Section("attention", "Attention over the GPUs of a host", "bash bench/bench.sh"),
    "double-ring-*": Section("attention", _TWO_HOSTS, "bash bench/bench.sh --two-hosts"),
    "ring-*": Section(
        "attention",
        "Stages and passes of the ring",
        "bench/ring.py",
        "forward and backward, causal, heads of 128; the range is that of the rounds; in its first "
        "form, which measured most cases six times and those of 64K and of two hosts four times",
    ),
    "usp-*": Section("attention", "USP: ring degree x Ulysses degree", "bash bench/bench.sh --usp"),
    "bias-*": Section("masks", "Scores with a bias", "bench/attention.py --masks bee"),
    "balance-*": Section("masks", "How evenly layouts share out work", "bench/balance.py"),
    "planning-*": Section("masks", "Time to plan a new mask on the host", "bench/planning.py"),
    "kernels-*": Section("time", "Kernels alone, on one GPU", "bench/kernels.py"),
    "value-heads-*": Section(
        "time",
        "Values with a smaller head size, on one GPU",
        "bench/kernels.py --value-dim",
        "medians of twelve rounds",
    ),
    "one-rank-*": Section("time", "One rank of a ring with imagined peers", "bench/one_rank.py"),
    "timeline-*": Section(
        "time", "Where the time of a forward and backward goes", "bench/timeline.py"
    ),
    "host-time-*": Section(
        "time",
        "Time of a call on the host of a rank",
        "bench/host_time.py",
        "medians of nine rounds of ten calls",
    ),
    "folds-*": Section(
        "training",
        "Separate and folded completions of a prompt",
        "bench/folds.py",
        "forward and backward without an optimizer, in bf16; errors are relative to separate rows",
    ),
    "power-*": Section(
        "time",
        "Power and clocks during the measurements",
        "nvidia-smi",
        "samples of a second above 500 W",
    ),
    "compare-*-mechanisms*": Section(
        "time",
        "Gains of the mechanisms that were removed",
        "bench/compare.py",
        "medians of four to six rounds; mechanisms.md lists what was removed",
    ),
    "compare-*-smaller*": Section(
        "time",
        "Calls and steps before and after the library became smaller",
        "bench/compare.py",
        "medians of six rounds, of two runs for pretraining; before is 689ff56",
    ),
    "compare-*-frame*": Section(
        "time",
        "Calls before and after they got one frame",
        "bench/compare.py",
        "medians of six rounds; before is 22d0dbac",
    ),
    "sides-*": Section(
        "time",
        "The side that a forward sends",
        "bench/sides.py",
        "in its first form, medians of seven calls; one host is NVLink, two are sockets of one "
        "machine",
    ),
    "sparse-*": Section("sparse", "Sparse and dense attention", "bench/sparse.py"),
    "longest-*": Section(
        "sparse",
        "The longest step with sparse attention",
        "bench/training.py --steps 1 --warm-up 0",
    ),
    "lightning-*": Section(
        "lightning",
        "Kernel, layer, ranks and errors",
        "bench/lightning.py --peers fla",
        "medians of rounds; extra GiB are beyond inputs, results and gradients",
    ),
    "training-*": Section("training", "Pretraining", "bench/training.py", _MEDIANS),
    "steps-*-whole.jsonl": Section(
        "training",
        "Whole models",
        "bench/steps.py",
        "the median of a few steps, or the only one",
    ),
    "steps-*-mixed.jsonl": Section(
        "training",
        "Documents of mixed lengths",
        "bench/steps.py --warm-up 2",
        "4 sequences of 128K a step, the same batches for all; `bench/mixed.py` wrote the "
        "documents, of 100 tokens to 128K in MagiAttention's shares; a balance of 1 means that all "
        "ranks have the same attention",
    ),
    "steps-*-fp8*": Section("training", "Steps with products in float8", "bench/steps.py"),
    "steps-*-h?00.jsonl": Section(
        "training", "Whole steps before and after a change", "bench/steps.py"
    ),
    "steps-*-again.jsonl": Section(
        "training", "Whole steps again, at a later commit", "bench/steps.py", _MEDIANS
    ),
    "steps-*-hybrid.jsonl": Section(
        "training", "Steps with lightning layers beside dense ones", "bench/steps.py", _MEDIANS
    ),
    "chunks-*-h?00.jsonl": Section("training", "Training in chunks", "bench/steps.py", _MEDIANS),
    "chunks-*-again.jsonl": Section(
        "training", "Training in chunks again, at a later commit", "bench/steps.py", _MEDIANS
    ),
    "chunks-*-256k.jsonl": Section(
        "training",
        "Training in chunks",
        "bench/steps.py --warm-up 0",
        "one step each, after shorter ones compiled the kernels",
    ),
    "chunks-*-longest.jsonl": Section(
        "training",
        "Training in chunks",
        "bench/steps.py",
        "the second of two steps, or a first one if there is no other; minicpm4-0.5b by "
        "train/pretrain.py",
    ),
    "generation-*-prompts.jsonl": Section(
        "training", "Generation over ranks", "bench/generation.py"
    ),
    "generation-*": Section(
        "training",
        "Generation over ranks",
        "bench/generation.py",
        "medians of 24 calls, which compute one token by a CUDA graph",
    ),
    "passes-*": Section("time", "Elementwise passes and the loss", "bench/passes.py"),
    "live-training-*": Section(
        "training",
        "Training CPM-Bee",
        "bench/live_training.py",
        f"{_MEDIANS} on one row",
    ),
    "trainers-*": Section(
        "training",
        "Trainers of transformers and TRL over ranks",
        "bench/trainers.py",
        f"{_MEDIANS}; the last column is the size of the logits of a whole sequence in fp32",
    ),
    "saving-*": Section("training", "How long a save stops training", "bench/saving.py"),
    # on a page of its own, bitwise.md
    "bitwise-*": Section("bitwise", "What is bitwise equal", "bench/bitwise.py", "run twice"),
}

# The pages: their titles, and their descriptions on results.md.
TOPICS = {
    "attention": ("Several GPUs", "lengths and strategies, 4 and 8 GPUs, a double ring, USP"),
    "masks": ("Masks and biases", "documents, windows, biases, balance, the time to plan a mask"),
    "time": ("Where the time goes", "kernels, one rank without communication, the host, power"),
    "sparse": ("Sparse attention", "InfLLM-V2 compared with dense attention"),
    "lightning": ("Lightning attention", "kernel, layer, ranks, errors, compared with fla-core"),
    "training": ("Training", "whole steps, CPM-Bee, saves"),
}

HEADLINES = (  # the sections of these files are on results.md itself
    "attention-2-nvidia-h200",
    "attention-2-nvidia-h200-masks",
    "training-2-nvidia-h200",
)

_INTRODUCTION = """# Results

`python bench/report.py --readme` writes this page and its topics from the rows in `bench/results/`,
a section for each file. No file is on two pages.

{topics}

## How it is measured

- **TFLOP/s** are per GPU and count only visible pairs: 4 D operations for each pair and head in the
  forward, 2.5 times as many in the backward.
- **Times** are those of the slowest rank. Each is the median of three rounds, and a round is the
  mean of consecutive calls.
- **GiB** is the peak of memory beyond the inputs.
- **"kernel alone"** is one GPU that computes as many tokens as a rank has, in one call.
  `bench/masks.py` describes its mask. **"FA4 varlen"** is FlashAttention-4's own function for the
  same mask.
- **Power** limits calls that follow one another: eight H200 are at 700 W and about 1600 of 1980
  MHz, also in "kernel alone". Rates are below those of single calls on cool GPUs.
- **Variants**: "nccl" uses no copy engines. "no overlap" waits for blocks before it computes. "low
  memory" has a `group_bytes` of 144 MiB. "naive ulysses" exchanges by collectives, before one
  kernel call and after it. "q" and "kv" name the side that a backward sends. "bmt_burst" is "q" for
  32:32 heads of one document and "kv" for 32:8, so differences between these rows are noise.
  "usp" shares heads between pairs of GPUs, with rings between the pairs.
- **Errors** of a ring include one more rounding, of partial results to bf16.
- **"two halves of a host"**: four GPUs emulate two hosts with a slow link, about 2.5 GiB/s a rank.
- **Pretraining at 1024K tokens** on 8 GPUs is a single step, with compilation.
- **The mask "bee"** is a row of CPM-Bee's long-context training with its bias
  (`bench/live_rows.py`). "without a bias" computes the same pairs without it. The kernel with a
  bias computes the pairs "by table"; some of these depend on segments ("by segments"), the others
  on distance alone.
- **Sparse attention** is InfLLM-V2. "80% overlap": of the blocks that a query chooses by score, it
  shares 80 % with the query before it. "random": queries choose independently (`bench/sparse.py`).
{versions}
"""


def section_of(file: Path) -> Section:
    """Return the section of a file. Raises ValueError if its name fits no pattern."""
    for pattern, section in SECTIONS.items():
        if fnmatch.fnmatch(file.name, pattern):
            return section
    raise ValueError(f"expected a name that fits one of {list(SECTIONS)}, got {file.name}")


def pages() -> dict[str, str]:
    """Return the texts of the generated pages, by their names. `write_pages` makes the plots."""
    found = RESULTS.glob("*.jsonl")
    files = sorted((file for file in found if section_of(file).topic in TOPICS), key=_place)
    versions = Counter(_versions(read_rows([file])) for file in files).most_common(1)[0][0]
    stated = tables.fill(f"- **Versions** are {versions}. Sections name other versions.", indent=2)
    texts = {"results.md": _INTRODUCTION.format(topics=_links(), versions=stated)}
    for topic, (title, _) in TOPICS.items():
        texts[f"results-{topic}.md"] = (
            f"# Results: {title}\n\n[How it is measured](results.md#how-it-is-measured)\n"
        )
    for file in files:
        section = section_of(file)
        name = "results.md" if file.stem in HEADLINES else f"results-{section.topic}.md"
        heading = f"\n## {section.title}\n"
        texts[name] += heading * (heading not in texts[name])
        texts[name] += f"\n{_file_text(file, section, versions)}\n"
    return texts | {"bitwise.md": with_tables((DOCS / "bitwise.md").read_text())}


def _place(file: Path) -> tuple[int, int, str]:
    """Return the keys by which files are sorted: topic, section, name."""
    section = section_of(file)
    topics, sections = list(TOPICS), list(SECTIONS.values())
    return topics.index(section.topic), sections.index(section), file.name


def _links() -> str:
    """Return a list of the topics' pages, and of hand-written pages."""
    lines = {f"results-{topic}.md": words for topic, words in TOPICS.items()}
    for file in sorted(DOCS.glob("results-*.md")):
        title = file.read_text().partition("\n")[0].removeprefix("# Results: ")
        lines.setdefault(file.name, (title, "written by hand"))
    return "\n".join(
        tables.fill(f"- [{title}]({name}): {text}", indent=2)
        for name, (title, text) in lines.items()
    )


def _file_text(file: Path, section: Section, usual_versions: str) -> str:
    """Return the text of a file: its command and machine, its plot, and its tables."""
    rows = read_rows([file])
    origin = _origin(file, rows, section, usual_versions)
    plots = [f"![TFLOP/s over the sequence length]({file.stem}.svg)"] * bool(several_lengths(rows))
    return "\n\n".join([origin, *plots, report(rows)])


def _origin(file: Path, rows: list[Row], section: Section, usual_versions: str = "") -> str:
    """Return a sentence with a file's name, command, machine and unusual versions."""
    way = f"`{section.command}`" + f", {section.note}" * bool(section.note)
    facts = [_machine(rows)] + [x for x in [_versions(rows)] if x != usual_versions]
    return tables.fill(f"`{file.name}`, by {way}: {', '.join(facts)}.")


def _machine(rows: list[Row]) -> str:
    """Return the GPU and the commits that rows were measured with, the most frequent first, and the
    dates if rows have them.
    """
    found = [commit for commit, _ in Counter(row["commit"][:7] for row in rows).most_common()]
    listed = " and ".join(part for part in (", ".join(found[:-1]), found[-1]) if part)
    dates = "".join(f", {date}" for date in sorted({row["date"] for row in rows if "date" in row}))
    return f"{rows[0]['gpu_name']}, commit{'s' * (len(found) > 1)} {listed}{dates}"


def _versions(rows: list[Row]) -> str:
    """Return the versions of the first row."""
    return ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())


def report(rows: list[Row]) -> str:
    """Return all tables of rows."""
    parts = [tables.attention_tables(rows), other_tables(rows)]
    if summary := tables.strategies_table(rows):
        title = "TFLOP/s of forward / backward, and % of the kernel alone for both"
        parts.insert(0, f"### {title}\n\n{summary}")
    return "\n\n".join(part for part in parts if part)


MARKED = re.compile(r"(<!-- results: (\w+) of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_GENERATED = {
    "peers": tables.peers_table,
    "masks": tables.masks_table,
    "strategies": tables.strategies_table,
    "training": sparse_training_table,
    "whole": whole_table,
}


def with_tables(readme: str) -> str:
    """Return the README's text with new contents between its markers."""
    return MARKED.sub(lambda m: f"{m[1]}{_generated(m[2], _ROOT / m[3])}\n{m[4]}", readme)


def _generated(kind: str, file: Path) -> str:
    """Return a plot or a table of a file's rows, with their machine."""
    rows = read_rows([file])
    if kind == "bitwise":
        return f"{_origin(file, rows, section_of(file))}\n\n{bitwise_table(rows)}"
    machine = f"{max(row.get('gpus', 1) for row in rows)} {_machine(rows)}"
    if kind != "plot":
        return f"{machine}:\n\n{_GENERATED[kind](rows)}"
    caption = (
        f"One causal sequence on {machine}. The dashed line is one GPU that computes its share "
        "without communication."
    )
    picture = f"![TFLOP/s per GPU over the sequence length](docs/{file.stem}-first.svg)"
    return f"{picture}\n\n{tables.fill(caption)}"


def write_pages() -> None:
    """Write the pages of results, the README's generated parts, and their plots."""
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    for file in RESULTS.glob("*.jsonl"):
        plot(read_rows([file]), DOCS / f"{file.stem}.svg")
    readme = _ROOT / "README.md"
    text = with_tables(readme.read_text())
    for _, kind, file, _ in MARKED.findall(text):
        if kind == "plot":
            plot(read_rows([_ROOT / file]), DOCS / f"{Path(file).stem}-first.svg", most=1)
    readme.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*", help="files of JSON lines")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the pages of results, and the README's tables and plot",
    )
    args = parser.parse_args()
    if args.readme == bool(args.results):
        parser.error("give either files of results or --readme")
    if args.readme:
        write_pages()
        return
    if missing := [str(file) for file in args.results if not file.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    try:
        rows = read_rows(args.results)
        if not rows:
            parser.error(f"{', '.join(map(str, args.results))}: nothing was measured")
        print(f"{_machine(rows)}, {_versions(rows)}\n\n{report(rows)}\n")
    except UnfitRow as error:
        parser.error(str(error))
    plot(rows, args.results[0].with_suffix(".png"))


if __name__ == "__main__":
    main()
