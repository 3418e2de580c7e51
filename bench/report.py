"""Tables (Markdown, on stdout) and a plot (PNG, beside the results) of measured rows.

    python bench/report.py bench/results/attention-8-nvidia-h200-*.jsonl
    python bench/report.py --readme     # rewrites docs/results.md and the README's tables and plot

docs/results.md has a section for each file of bench/results.

In the README, `<!-- results: KIND of FILE -->` and `<!-- end -->` enclose what this script writes.
To show another file there, change FILE, and run this script with --readme.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import tables
from bench.other_tables import other_tables, sparse_training_table
from bench.tables import (
    Row,
    alone,
    attention_groups,
    describe,
    implementation,
    read_rows,
)

_ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = _ROOT / "bench/results", _ROOT / "docs"

# How a file's name begins -> the title of its section, and the command that wrote it.
SECTIONS = {
    "attention": ("Attention over the GPUs of a host", "`bash bench/bench.sh`"),
    "double-ring": (
        "A double ring: two halves of a host, with a slow link between them",
        "`bash bench/bench.sh --two-hosts`",
    ),
    "usp": ("USP: ring degree x Ulysses degree", "`bash bench/bench.sh --usp`"),
    "bias": ("Scores with a bias", "`bench/attention.py --masks bee`"),
    "kernels": ("Kernels alone, on one GPU", "`bench/kernels.py`"),
    "value-heads": (
        "Values with a head size of their own, on one GPU",
        "`bench/value_heads.py`, medians of twelve rounds",
    ),
    "one-rank": ("One rank of a ring with imagined peers", "`bench/one_rank.py`"),
    "sparse": ("Sparse attention beside dense", "`bench/sparse.py`"),
    "timeline": ("Where the time of a forward and backward goes", "`bench/timeline.py`"),
    "host-time": (
        "Time of a call on the host of a rank",
        "`bench/host_time.py`, medians of nine rounds of ten calls",
    ),
    "training": ("Pretraining", "`bench/training.py`, medians over steps"),
    "longest": (
        "The longest step with sparse attention",
        "`bench/training.py --steps 1 --warm-up 0`",
    ),
    "saving": ("For how long a save stops training", "`bench/saving.py`"),
    "live-training": (
        "Training CPM-Bee and CPM-Ant",
        "`bench/live_training.py`, medians over steps on one row",
    ),
    "planning": ("Time to plan a new mask, on the host of a rank", "`bench/planning.py`"),
    "balance": ("How evenly layouts share out work", "`bench/balance.py`"),
    "power": (
        "Power and clocks during the measurements",
        "`nvidia-smi`, samples of a second above 500 W",
    ),
}

_INTRODUCTION = """# Results

`python bench/report.py --readme` writes this page from the rows in `bench/results/`, a section for
each file. Every section names the commits, the GPU and the versions that it was measured with.

- **TFLOP/s** are per GPU and count only visible pairs: 4 D operations for each pair and head in the
  forward, 2.5 times as many in the backward.
- **Times** are the slowest rank's. Each is the median of three rounds, and a round is the
  mean of consecutive calls.
- **GiB** is the peak of memory beyond the inputs.
- **"kernel alone"** is one GPU that computes as many tokens as a rank has, in one call.
  `bench/masks.py` says with which mask. **"FA4 varlen"** is FlashAttention-4's own function for the
  same.
- **The mask "bee"** is a row of CPM-Bee's long-context training with its bias
  (`bench/live_rows.py`). "without a bias" computes the same pairs without it. The kernel with a
  bias computes the pairs "by table"; some of these depend on segments ("by segments"), the others
  on distance alone.
- **Sparse attention** is InfLLM-V2. "80% overlap": of the blocks that a query chose by score, the
  next query chose 80 %. "random": queries choose independently (`bench/sparse.py`).
"""


def known(file: Path) -> str:
    """Return the name in SECTIONS that a file begins with. Raises ValueError if there is none."""
    for name in SECTIONS:
        if file.name.startswith(f"{name}-"):
            return name
    raise ValueError(f"expected a name that begins with one of {list(SECTIONS)}, got {file.name}")


def page() -> str:
    """Return the text of docs/results.md. `write_pages` makes its plots."""
    order = list(SECTIONS)
    files = sorted(RESULTS.glob("*.jsonl"), key=lambda file: (order.index(known(file)), file.name))
    return "\n".join([_INTRODUCTION, *map(_section, files)])


def _section(file: Path) -> str:
    """Return the page's section of a file."""
    rows, (title, way) = read_rows([file]), SECTIONS[known(file)]
    picture = (
        f"![TFLOP/s over the sequence length]({file.stem}.svg)\n\n" if several_lengths(rows) else ""
    )
    origin = tables.fill(f"`{file.name}`, by {way}: {where(rows)}.")
    return f"## {title}\n\n{origin}\n\n{picture}{report(rows)}\n"


def where(rows: list[Row]) -> str:
    """Return the GPU and commits that rows were measured with, and the versions of the first."""
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    return f"{rows[0]['gpu_name']}, {_commits(rows)}, {versions}"


def _commits(rows: list[Row]) -> str:
    """Return the commits of rows, the most frequent first."""
    found = [commit for commit, _ in Counter(row["commit"][:7] for row in rows).most_common()]
    return f"commit{'s' * (len(found) > 1)} {' and '.join(found)}"


def report(rows: list[Row]) -> str:
    """Return all tables of some rows."""
    return "\n\n".join(part for part in (tables.attention_tables(rows), other_tables(rows)) if part)


def several_lengths(rows: list[Row]) -> dict[tuple, list[Row]]:
    """Return the cases with several lengths, which are worth a plot, with their rows."""
    return {
        case: group
        for case, group in attention_groups(rows).items()
        if len({r["seq_len"] for r in group}) > 1
    }


def plot(rows: list[Row], file: Path, most: int | None = None) -> None:
    """Plot TFLOP/s per GPU of forward and backward over the sequence length.

    Each case with several lengths has a panel. `most` limits the number of cases.
    """
    groups = dict(list(several_lengths(rows).items())[:most])
    if not groups:
        return
    try:
        import matplotlib
    except ImportError:
        print("No plots: the package matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # identical files in every run, and small ones
    matplotlib.rcParams |= {"svg.hashsalt": "bmt_burst", "svg.fonttype": "none"}
    lines = dict.fromkeys(_line(row) for group in groups.values() for row in group)
    colours = {line: f"C{i % 10}" for i, line in enumerate(lines)}
    columns = min(len(groups), 3)
    rows_of_panels = -(-len(groups) // columns)
    size = (6 * columns, 4.5 * rows_of_panels)
    figure, panels = plt.subplots(
        rows_of_panels, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, (case, group) in zip(panels.flat, groups.items(), strict=False):
        _draw(panel, rows, group, colours)
        panel.set(
            xscale="log",
            xlabel="tokens",
            ylabel="TFLOP/s per GPU, forward + backward",
            title=describe(case),
        )
        lengths = sorted({row["seq_len"] for row in group})
        panel.set_xticks(lengths, map(tables.tokens, lengths))
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    if file.suffix == ".svg":
        file.write_text(_shorten(file.read_text()))
    plt.close(figure)
    print(f"Plot: {file}")


def _shorten(svg: str) -> str:
    """Return a picture with two decimals, a hundredth of a point, without indentation and
    metadata.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"(\.\d\d)\d+", r"\1", svg))


def _line(row: Row) -> tuple[str, str]:
    """Return which line of a plot a row is a point of."""
    return implementation(row), row["kernel"]


def _draw(panel, rows: list[Row], group: list[Row], colours: dict[tuple[str, str], str]) -> None:
    """Draw the lines of a case, and dashed or dotted lines for the yardsticks."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in group:
        lines[_line(row)].append((row["seq_len"], row["fwd_bwd_tflops_per_gpu"]))
    several = len({kernel for _, kernel in lines}) > 1
    for line, points in lines.items():
        label = f"{line[0]} ({line[1]})" if several else line[0]
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=label, color=colours[line])
    lengths = sorted({row["seq_len"] for row in group})
    for name, style in zip(tables.YARDSTICKS, ("k--", "k:"), strict=True):
        limits = [
            alone(rows, next(r for r in group if r["seq_len"] == length), name)
            for length in lengths
        ]
        if all(limits):
            panel.plot(lengths, [r["fwd_bwd_tflops_per_gpu"] for r in limits], style, label=name)


MARKED = re.compile(r"(<!-- results: (\w+) of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_GENERATED = {
    "peers": tables.peers_table,
    "masks": tables.masks_table,
    "training": sparse_training_table,
}


def with_tables(readme: str) -> str:
    """Return the README's text with new contents between its markers."""
    return MARKED.sub(lambda m: f"{m[1]}{_generated(m[2], _ROOT / m[3])}\n{m[4]}", readme)


def _generated(kind: str, file: Path) -> str:
    """Return a plot or a table of a file's rows, with what they were measured on."""
    rows = read_rows([file])
    machine = f"{max(row.get('gpus', 1) for row in rows)} {rows[0]['gpu_name']}"
    if kind != "plot":
        return f"{machine}, {_commits(rows)}:\n\n{_GENERATED[kind](rows)}"
    caption = (
        f"One causal sequence on {machine}, measured at {_commits(rows)}. The dashed line is one "
        "GPU that computes its share without communication."
    )
    picture = f"![TFLOP/s per GPU over the sequence length](docs/{file.stem}-first.svg)"
    return f"{picture}\n\n{tables.fill(caption)}"


def write_pages() -> None:
    """Write docs/results.md, the README's generated parts, and their plots."""
    DOCS.mkdir(exist_ok=True)
    (DOCS / "results.md").write_text(page())
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
        help="write docs/results.md and the README's tables and plot",
    )
    args = parser.parse_args()
    if args.readme == bool(args.results):
        parser.error("give either files of results or --readme")
    if args.readme:
        write_pages()
        return
    rows = read_rows(args.results)
    if not rows:
        parser.error(f"{', '.join(map(str, args.results))}: nothing was measured")
    print(f"{where(rows)}\n\n{report(rows)}\n")
    plot(rows, args.results[0].with_suffix(".png"))


if __name__ == "__main__":
    main()
