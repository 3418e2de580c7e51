"""Tables (Markdown, on stdout) and plots (PNG, beside the results) of what this folder's scripts measured.

python bench/report.py bench/results/attention-8-nvidia-h200-*.jsonl
python bench/report.py --readme        # writes the README's tables anew, from the results that it names
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
CASE = ("gpus", "batch", "heads", "kv_heads", "head_dim", "mask")
YARDSTICKS = ("kernel alone", "FA4 varlen")  # on one GPU


def read_rows(files: Iterable[Path]) -> list[Row]:
    """All rows. Those from before there were documents say whether they are causal."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for row in rows:
        if "causal" in row:
            row["mask"] = "causal" if row.pop("causal") else "full"
    return rows


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; floats with three significant digits."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(rows: list[Row]) -> list[Row]:
    """Rows of attention over several ranks, without what could not be measured."""
    return [r for r in rows if r["kind"] == "attention" and r["impl"] not in YARDSTICKS and "fwd_ms" in r]


def attention_groups(rows: list[Row]) -> dict[tuple, list[Row]]:
    """Measured rows by everything but length and implementation."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in measured(rows):
        groups[tuple(row[name] for name in CASE)].append(row)
    return groups


def alone(rows: list[Row], row: Row, impl: str = "kernel alone") -> Row | None:
    """A yardstick's measurement that belongs to a row, of the row's own kernel if that was measured, None without."""
    same = ("kind", "batch", "heads", "kv_heads", "head_dim", "mask")
    found = [
        other
        for other in rows
        if other.get("impl") == impl
        and "fwd_ms" in other
        and other["seq_len"] * row["gpus"] == row["seq_len"]
        and other.get("share_of", row["gpus"]) == row["gpus"]
        and all(other[name] == row[name] for name in same)
    ]
    return max(found, key=lambda other: other["kernel"] == row["kernel"], default=None)


def bwd_rate(row: Row) -> float:
    """TFLOP/s per GPU of the backward: 2.5 times a forward's work, in the time by which both take longer than that.

    NaN where both took no longer, which is the noise of tiny runs.
    """
    bwd_ms = row["fwd_bwd_ms"] - row["fwd_ms"]
    return 2.5 * row["fwd_tflops_per_gpu"] * row["fwd_ms"] / bwd_ms if bwd_ms > 0 else math.nan


def describe(case: tuple) -> str:
    gpus, batch, heads, kv_heads, head_dim, mask = case
    return f"{gpus} ranks, batch {batch}, {heads}:{kv_heads} heads of {head_dim}, {mask}"


def attention_tables(rows: list[Row]) -> str:
    parts = []
    rates = ["fwd TFLOP/s", "bwd TFLOP/s", "fwd+bwd TFLOP/s", "% of kernel alone"]
    header = ["tokens", "implementation", "kernel", "fwd ms", "fwd+bwd ms", *rates, "GiB"]
    for case, group in attention_groups(rows).items():
        lines = [_line(row, shown, rows) for row, shown in _beside_yardsticks(rows, group)]
        parts.append(f"### {describe(case)}\n\n" + table(header, lines))
    return "\n\n".join(parts)


def _line(row: Row, shown: Row, rows: list[Row]) -> list[Any]:
    """Of what is shown beside a row: the row itself, or a yardstick."""
    limit = alone(rows, row)
    return [
        tokens(row["seq_len"]),
        implementation(shown),
        shown["kernel"],
        shown["fwd_ms"],
        shown["fwd_bwd_ms"],
        shown["fwd_tflops_per_gpu"],
        bwd_rate(shown),
        shown["fwd_bwd_tflops_per_gpu"],
        100 * shown["fwd_bwd_tflops_per_gpu"] / limit["fwd_bwd_tflops_per_gpu"] if limit else "-",
        "-" if shown["peak_extra_gib"] is None else shown["peak_extra_gib"],
    ]


def _beside_yardsticks(rows: list[Row], group: list[Row]) -> list[tuple[Row, Row]]:
    """The rows of a group, each as (row, row), and before those of a length its yardsticks as (row, yardstick)."""
    found: dict[tuple, tuple[Row, Row]] = {}
    for row in sorted(group, key=lambda row: row["seq_len"]):
        yardsticks = [alone(rows, row, name) for name in YARDSTICKS]
        for shown in (*filter(None, yardsticks), row):
            found.setdefault((row["seq_len"], id(shown)), (row, shown))
    return list(found.values())


def attention_summary(rows: list[Row]) -> str:
    """Rates of forward / forward and backward by length, and after them the memory at each of these lengths."""
    lengths = sorted({row["seq_len"] for row in measured(rows)})
    lines: dict[tuple, dict[int, Row]] = defaultdict(dict)
    for row in measured(rows):
        for shown in (*filter(None, (alone(rows, row, name) for name in YARDSTICKS)), row):
            line = row["batch"], heads(row), row["mask"], implementation(shown), shown["kernel"]
            lines[line][row["seq_len"]] = shown
    header = ["batch", "heads", "mask", "implementation", "kernel", *map(tokens, lengths), "GiB"]
    return table(header, [[*line, *_rates(found, lengths)] for line, found in lines.items()])


def _rates(found: dict[int, Row], lengths: list[int]) -> list[str]:
    measured = [found.get(length) for length in lengths]
    rates = [f"{r['fwd_tflops_per_gpu']:.0f} / {r['fwd_bwd_tflops_per_gpu']:.0f}" if r else "" for r in measured]
    gib = [f"{r['peak_extra_gib']:.2f}" for r in measured if r and r["peak_extra_gib"] is not None]
    return [*rates, ", ".join(gib)]


def one_rank_table(rows: list[Row]) -> str:
    """The slowest of the ranks measured, and the profile of where its time goes."""
    cases: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "one rank" and "rank" in row:
            cases[tuple(row[name] for name in (*CASE, "impl", "seq_len"))].append(row)
    facts = ["ranks", "heads", "mask", "kernel", "tokens", "implementation"]
    header = [*facts, "fwd", "bwd", "fwd+bwd", *YARDSTICKS, "sums %", "idle %", "GiB"]
    lines = []
    for ranks in cases.values():
        row = max(ranks, key=lambda r: r["fwd_bwd_ms"])
        limits = [alone(rows, row, name) for name in YARDSTICKS]
        spent = row.get("ms") or dict.fromkeys(("merge", "idle"), 0.0) | {"span": 1.0}
        shares = [f"{100 * spent.get(name, 0.0) / spent['span']:.1f}" for name in ("merge", "idle")]
        gib = "-" if row["peak_extra_gib"] is None else max(r["peak_extra_gib"] for r in ranks)
        rates = [row["fwd_tflops_per_gpu"], bwd_rate(row), row["fwd_bwd_tflops_per_gpu"]]
        rates += [limit["fwd_bwd_tflops_per_gpu"] if limit else "-" for limit in limits]
        case = [row["gpus"], heads(row), row["mask"], row["kernel"], tokens(row["seq_len"]), row["impl"]]
        lines.append([*case, *rates, *shares, gib])
    return table(header, lines) if lines else ""


def training_table(rows: list[Row]) -> str:
    lines = [
        [
            *(row[name] for name in ("model", "layers", "engine", "gpus")),
            tokens(row["seq_len"]),
            checkpointing(row),
            round(row["tokens_per_s_per_gpu"]),
            *("-" if row.get(n) is None else row[n] for n in ("mfu", "peak_gib")),
            row["step_s"],
        ]
        for row in rows
        if row["kind"] == "train" and "step_s" in row
    ]
    header = ["model", "layers", "engine", "GPUs", "tokens", "checkpointing", "tokens/s/GPU", "MFU", "GiB", "s/step"]
    return table(header, lines) if lines else ""


def implementation(row: Row) -> str:
    return row["impl"] + (", double ring" if (row.get("inner_size") or row["gpus"]) < row["gpus"] else "")


def checkpointing(row: Row) -> str:
    blocks = row.get("checkpointing_blocks")
    return row["checkpointing"] + ("" if blocks is None else f", {blocks} blocks")


def heads(row: Row) -> str:
    return f"{row['heads']}:{row['kv_heads']} x {row['head_dim']}"


def tokens(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 else str(length)


def error_table(rows: list[Row]) -> str:
    names = ["out", "dq", "dk", "dv"]
    lines = [
        [
            r["impl"],
            f"{r['heads']}:{r['kv_heads']}",
            r["kernel"],
            r["mask"],
            tokens(r["seq_len"]),
            *(f"{r[n]:.2e}" for n in names),
        ]
        for r in rows
        if r["kind"] == "errors" and "dq" in r
    ]
    return table(["implementation", "heads", "kernel", "mask", "tokens", *names], lines) if lines else ""


def planning_table(rows: list[Row]) -> str:
    """What a new mask costs a rank on the host: medians in milliseconds."""
    found = [row for row in rows if row["kind"] == "planning"]
    parts = list(found[0]["ms"]) if found else []
    header = ["mask", "documents", "ranks", "backward", *(f"{part} ms" for part in parts), "all ms", "target ms"]
    facts = ("mask", "documents", "gpus", "backward")
    lines = [[*(row[f] for f in facts), *row["ms"].values(), row["total_ms"], row["target_ms"]] for row in found]
    return table(header, lines) if lines else ""


def memory_table(rows: list[Row]) -> str:
    names = ["masks", "grown_kib", "resident_grown_kib"]
    lines = [[row[name] for name in names] for row in rows if row["kind"] == "planning memory"]
    return table(["masks", "Python's memory, KiB more", "resident, KiB more"], lines) if lines else ""


def link_table(rows: list[Row]) -> str:
    lines = [[r["impl"], r["message_mib"], r["gib_per_s"]] for r in rows if r["kind"] == "links"]
    return table(["way", "message MiB", "GiB/s received"], lines) if lines else ""


def other_tables(rows: list[Row]) -> str:
    """Those of all kinds but attention; and what could not be measured."""
    tables = {
        "One rank whose peers are imagined: TFLOP/s": one_rank_table(rows),
        "Training": training_table(rows),
        "A new mask's plan, on the host": planning_table(rows),
        "Memory after many masks": memory_table(rows),
        "Links alone": link_table(rows),
        "Error against float64 (relative L2)": error_table(rows),
    }
    parts = [f"### {title}\n\n{text}" for title, text in tables.items() if text]
    missing = sorted({(r["impl"], r["unavailable"]) for r in rows if "unavailable" in r})
    parts += [f"Not measured: {name}: {reason}" for name, reason in missing]
    return "\n\n".join(parts)


def plot(rows: list[Row], file: Path) -> None:
    """TFLOP/s per GPU of forward and backward over the sequence length, a panel a case with several lengths."""
    groups = {c: g for c, g in attention_groups(rows).items() if len({r["seq_len"] for r in g}) > 1}
    if not groups:
        return
    try:
        import matplotlib
    except ImportError:
        print("No plots: the package matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(groups), figsize=(6 * len(groups), 4.5), squeeze=False, layout="constrained")
    for panel, (case, group) in zip(panels[0], groups.items(), strict=True):
        several = len({row["kernel"] for row in group}) > 1
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in group:
            label = implementation(row) + (f" ({row['kernel']})" if several else "")
            lines[label].append((row["seq_len"], row["fwd_bwd_tflops_per_gpu"]))
        for label, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        lengths = sorted({row["seq_len"] for row in group})
        for name, style in zip(YARDSTICKS, ("k--", "k:"), strict=True):
            limits = [alone(rows, next(r for r in group if r["seq_len"] == length), name) for length in lengths]
            if all(limits):
                panel.plot(lengths, [r["fwd_bwd_tflops_per_gpu"] for r in limits], style, label=name)
        panel.set(xscale="log", xlabel="tokens", ylabel="TFLOP/s per GPU, forward + backward", title=describe(case))
        panel.set_ylim(bottom=0)
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    print(f"\nPlots: {file}")


MARKED = re.compile(r"(<!-- results: (\w+) of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLES = {
    "attention": attention_summary,
    "errors": error_table,
    "links": link_table,
    "planning": planning_table,
    "train": training_table,
}


def with_tables(readme: str) -> str:
    """The README's text with its tables, each of one kind of a file's rows, as the results have them."""
    return MARKED.sub(lambda m: f"{m[1]}{_TABLES[m[2]](read_rows([_ROOT / m[3]]))}\n{m[4]}", readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="files of JSON lines")
    parser.add_argument("--readme", action="store_true", help="write the README's tables instead")
    args = parser.parse_args()
    if args.readme == bool(args.results):
        parser.error("give either files of results or --readme")
    if args.readme:
        readme = _ROOT / "README.md"
        readme.write_text(with_tables(readme.read_text()))
        return
    rows = read_rows(args.results)
    if not rows:
        parser.error(f"{', '.join(map(str, args.results))}: nothing was measured")
    first = rows[0]
    print(f"{first['gpu_name']}, commit {first['commit']}, {first['versions']}\n")
    print("\n\n".join(part for part in (attention_tables(rows), other_tables(rows)) if part))
    plot(rows, args.results[0].with_suffix(".png"))


if __name__ == "__main__":
    main()
