"""Markdown tables of measured rows. bench/report.py prints them and writes the pages."""

from __future__ import annotations

import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

Row = dict[str, Any]
Column = str | Callable[[Row], Any]  # a field of a row, or what is computed from the row
CASE = ("gpus", "batch", "heads", "kv_heads", "head_dim", "mask")
YARDSTICKS = ("kernel alone", "FA4 varlen")  # on one GPU
UNBIASED = "bmt_burst without a bias"


def fill(text: str, indent: int = 0) -> str:
    """Wrap a paragraph to lines of 100 columns, with later lines indented."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent=" " * indent, **options)


class UnfitRow(ValueError):
    """A line of a file that is no row of a benchmark, or a row that lacks a fact."""


class _FileRow(dict[str, Any]):
    """A row that knows its place in a file. Raises UnfitRow for facts that it lacks."""

    def __init__(self, facts: Row, place: str):
        super().__init__(facts)
        self.place = place

    def __missing__(self, name: str) -> NoReturn:
        raise UnfitRow(f"{self.place}: expected a row with {name!r}, got one with {[*self]}")


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Read all rows. Old rows have a field `causal` instead of a mask."""
    rows: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
            rows.append(_read_row(line, f"{file}, row {number}"))
    return rows


def _read_row(line: str, place: str) -> Row:
    try:
        row = _FileRow(json.loads(line), place)
    except (ValueError, TypeError) as error:
        raise UnfitRow(f"{place}: expected a row of JSON, got {line[:60]!r}") from error
    if "causal" in row:
        row["mask"] = "causal" if row.pop("causal") else "full"
    return row


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Format a Markdown table, floats with three significant digits. Without rows it is empty."""
    if not rows:
        return ""
    cells = [
        [_short(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def list_rows(
    rows: list[Row], kind: str, columns: dict[str, Column], needs: str | None = None
) -> str:
    """Format a line for each row of a kind, or for each that has the field `needs`."""
    lines = [
        [row[column] if isinstance(column, str) else column(row) for column in columns.values()]
        for row in rows
        if row["kind"] == kind and (needs is None or needs in row)
    ]
    return table(list(columns), lines)


def or_dash(value: Any) -> Any:
    """Return a value, or "-" for None."""
    return "-" if value is None else value


def measured(rows: list[Row]) -> list[Row]:
    """Return the rows of attention over several ranks that could be measured."""
    return [
        r
        for r in rows
        if r["kind"] == "attention" and r["impl"] not in YARDSTICKS and "fwd_ms" in r
    ]


def attention_groups(rows: list[Row]) -> dict[tuple, list[Row]]:
    """Group measured rows by everything except length and implementation."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in measured(rows):
        groups[tuple(row[name] for name in CASE)].append(row)
    return groups


def alone(rows: list[Row], row: Row, impl: str = "kernel alone") -> Row | None:
    """Return the yardstick's row that belongs to a row, or None if there is none.

    If there are several, it is the one of the row's own kernel.
    """
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
    """Compute TFLOP/s per GPU of the backward, which has 2.5 times a forward's work.

    Its time is that of both minus that of the forward. It is NaN if both took no longer than a
    forward, as noise makes tiny runs do.
    """
    bwd_ms = row["fwd_bwd_ms"] - row["fwd_ms"]
    return 2.5 * row["fwd_tflops_per_gpu"] * row["fwd_ms"] / bwd_ms if bwd_ms > 0 else math.nan


def rates(row: Row) -> list[float]:
    """Return TFLOP/s per GPU of the forward, the backward and both."""
    return [row["fwd_tflops_per_gpu"], bwd_rate(row), row["fwd_bwd_tflops_per_gpu"]]


def percents(row: Row, other: Row) -> list[float]:
    """Compute a row's rates of forward, backward and both in percent of another row's.

    They are NaN if the other row has no visible pairs.
    """
    pairs = zip(rates(row), rates(other), strict=True)
    return [100 * mine / its if its else math.nan for mine, its in pairs]


def describe(case: tuple) -> str:
    """Return a case in words."""
    gpus, batch, heads, kv_heads, head_dim, mask = case
    return f"{gpus} ranks, batch {batch}, {heads}:{kv_heads} heads of {head_dim}, {mask}"


def attention_tables(rows: list[Row]) -> str:
    """Format a table of each case, with its yardsticks."""
    parts = []
    header = ["tokens", "implementation", "kernel", "fwd ms", "fwd+bwd ms", "fwd TFLOP/s"]
    header += ["bwd TFLOP/s", "fwd+bwd TFLOP/s", "% of kernel alone", "GiB"]
    for case, group in attention_groups(rows).items():
        lines = [_line(row, shown, rows) for row, shown in _with_yardsticks(rows, group)]
        parts.append(f"### {describe(case)}\n\n" + table(header, lines))
    return "\n\n".join(parts)


def _line(row: Row, shown: Row, rows: list[Row]) -> list[Any]:
    """Return a line for `shown`, which is the row itself or one of its yardsticks."""
    limit = alone(rows, row)
    return [
        tokens(row["seq_len"]),
        implementation(shown),
        shown["kernel"],
        shown["fwd_ms"],
        shown["fwd_bwd_ms"],
        *rates(shown),
        percents(shown, limit)[2] if limit else "-",
        or_dash(shown["peak_extra_gib"]),
    ]


def _with_yardsticks(rows: list[Row], group: list[Row]) -> list[tuple[Row, Row]]:
    """Return pairs (row, row) of a group, and before each length pairs (row, yardstick)."""
    found: dict[tuple, tuple[Row, Row]] = {}
    for row in sorted(group, key=lambda row: row["seq_len"]):
        yardsticks = [alone(rows, row, name) for name in YARDSTICKS]
        for shown in (*filter(None, yardsticks), row):
            found.setdefault((row["seq_len"], id(shown)), (row, shown))
    return list(found.values())


def peers_table(rows: list[Row]) -> str:
    """Format a causal mask's table: a line for each implementation, a column for each heads."""
    found = [row for row in measured(rows) if row["mask"] == "causal"]
    return _compared(rows, found, lambda row: f"{heads(row)} heads")


def masks_table(rows: list[Row]) -> str:
    """Format documents and windows: a line for each implementation, a column for each mask."""
    found = [r for r in measured(rows) if r["mask"] not in ("causal", "full")]
    several = len({heads(row) for row in found}) > 1

    def column(row: Row) -> str:
        return f"{row['mask']}, {heads(row)} heads" if several else row["mask"]

    return _compared(rows, found, column)


def strategies_table(rows: list[Row]) -> str:
    """Compare USP with the others: a line for each implementation, a column for each case.

    Without rows of USP it is empty.
    """
    found = [row for row in measured(rows) if row["batch"] == 1]
    found.sort(key=lambda row: (row["mask"], row["seq_len"]))
    if not any(row["impl"] == "usp" for row in found):
        return ""
    shapes = {heads(row) for row in found}, {row["gpus"] for row in found}

    def column(row: Row) -> str:
        of_heads = f"{heads(row)} heads", f"{row['gpus']} GPUs"
        more = [fact for fact, each in zip(of_heads, shapes, strict=True) if len(each) > 1]
        return ", ".join([row["mask"], tokens(row["seq_len"] // row["gpus"]), *more])

    return _crossed(rows, found, "tokens of a GPU", column)


def _compared(rows: list[Row], found: list[Row], column: Callable[[Row], str]) -> str:
    """Compare implementations at the longest sequence that all of them were measured with.

    Only batches of one count, and no variants of ours.
    """
    found = [r for r in found if r["batch"] == 1 and not r["impl"].startswith("bmt_burst ")]
    names = {(row["impl"], row["kernel"]) for row in found}
    if not names:
        return ""
    most = min(
        max(r["seq_len"] for r in found if (r["impl"], r["kernel"]) == name) for name in names
    )
    longest = [row for row in found if row["seq_len"] == most]
    return _crossed(rows, longest, f"{tokens(most)} tokens", column)


def _crossed(rows: list[Row], found: list[Row], corner: str, column: Callable[[Row], str]) -> str:
    """Format a line for each implementation of `found` and each yardstick, in columns."""
    cells: dict[tuple, dict[str, str]] = defaultdict(dict)
    for row in found:
        for shown in (*filter(None, (alone(rows, row, name) for name in YARDSTICKS)), row):
            line = cells[implementation(shown), shown["kernel"]]
            line[column(row)] = _brief(shown, alone(rows, row))
    columns = list(dict.fromkeys(name for line in cells.values() for name in line))
    lines = [[*facts, *(line.get(name, "") for name in columns)] for facts, line in cells.items()]
    return table([corner, "kernel", *columns], lines)


def _brief(row: Row, limit: Row | None) -> str:
    """Return the rates of forward and backward, and the share of the limit for both."""
    text = f"{row['fwd_tflops_per_gpu']:.0f} / {bwd_rate(row):.0f}"
    if limit is None or limit is row:
        return text
    return f"{text} ({percents(row, limit)[2]:.0f}%)"


def one_rank_table(rows: list[Row]) -> str:
    """Format the slowest of the measured ranks, and how it spends its time."""
    cases: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "one rank" and "rank" in row and "fwd_ms" in row:
            cases[tuple(row[name] for name in (*CASE, "impl", "seq_len"))].append(row)
    facts = ["ranks", "batch", "heads", "mask", "kernel", "tokens", "implementation"]
    header = [*facts, "fwd", "bwd", "fwd+bwd", *YARDSTICKS, "sums %", "idle %", "GiB"]
    lines = []
    for ranks in cases.values():
        row = max(ranks, key=lambda r: r["fwd_bwd_ms"])
        limits = [alone(rows, row, name) for name in YARDSTICKS]
        spent = row.get("ms") or dict.fromkeys(("merge", "idle"), 0.0) | {"span": 1.0}
        shares = [f"{100 * spent.get(name, 0.0) / spent['span']:.1f}" for name in ("merge", "idle")]
        gib = "-" if row["peak_extra_gib"] is None else max(r["peak_extra_gib"] for r in ranks)
        alone_rates = [limit["fwd_bwd_tflops_per_gpu"] if limit else "-" for limit in limits]
        case = [row["gpus"], row["batch"], heads(row), row["mask"], row["kernel"]]
        case += [tokens(row["seq_len"]), row["impl"]]
        lines.append([*case, *rates(row), *alone_rates, *shares, gib])
    return table(header, lines)


def sparse_table(rows: list[Row]) -> str:
    """Format sparse and dense attention, and the same work without communication."""
    found = [row for row in rows if row["kind"] == "sparse" and "fwd_ms" in row]
    facts = ("gpus", "peers", "batch", "heads", "kv_heads", "head_dim", "seq_len", "impl", "commit")

    def find(row: Row, **other: str) -> Row | None:
        wanted = [(row | other).get(fact) for fact in facts]
        return next((r for r in found if [r.get(fact) for fact in facts] == wanted), None)

    def gain(row: Row) -> Any:
        dense = find(row, impl="dense")
        return dense["fwd_bwd_ms"] / row["fwd_bwd_ms"] if dense else "-"

    def share(row: Row) -> str:
        silent = find(row, peers="imagined") if row["peers"] == "real" else None
        return f"{100 * silent['fwd_bwd_ms'] / row['fwd_bwd_ms']:.1f}" if silent else "-"

    def beyond(row: Row) -> Any:
        dense = find(row, impl="dense")
        gib, dense_gib = row["peak_extra_gib"], dense and dense["peak_extra_gib"]
        return "-" if gib is None or dense_gib is None else gib - dense_gib

    columns: dict[str, Column] = {
        "where": _place,
        "batch": "batch",
        "tokens": lambda row: tokens(row["seq_len"]),
        "heads": heads,
        "attention": "impl",
        "overlap %": lambda row: (
            "-" if row.get("overlap") is None else f"{100 * row['overlap']:.1f}"
        ),
        "fwd ms": "fwd_ms",
        "bwd ms": "bwd_ms",
        "fwd+bwd ms": "fwd_bwd_ms",
        "times as fast as dense": gain,
        "% of no communication": share,
        "GiB": lambda row: or_dash(row["peak_extra_gib"]),
        "GiB beyond dense": beyond,
    }
    return list_rows(found, "sparse", columns)


def _place(row: Row) -> str:
    """Return which ranks computed a row of `sparse_table`."""
    if row["peers"] == "no":
        return "one GPU"
    return f"{row['gpus']} GPUs" if row["peers"] == "real" else f"one rank of {row['gpus']}"


def implementation(row: Row) -> str:
    """Return the name of a row's implementation."""
    return row["impl"] + (
        ", double ring" if (row.get("inner_size") or row["gpus"]) < row["gpus"] else ""
    )


def heads(row: Row) -> str:
    """Return a row's numbers of heads and head size."""
    return f"{row['heads']}:{row['kv_heads']} x {row['head_dim']}"


def tokens(length: int) -> str:
    """Return a length in K, if it is long enough."""
    return f"{length // 1024}K" if length >= 1024 else str(length)


def bias_table(rows: list[Row]) -> str:
    """Format attention with a bias, in percent of the same pairs without one."""
    lines = []
    for row in measured(rows):
        plain = next(
            (r for r in measured(rows) if r["impl"] == UNBIASED and _same_work(r, row)), None
        )
        if "bias_rows" not in row or plain is None:
            continue
        case = [row["gpus"], tokens(row["seq_len"]), heads(row), row["mask"], implementation(row)]
        pairs = [
            f"{100 * row[name] / row['visible_pairs']:.1f}"
            for name in ("own_row_pairs", "segment_pairs")
        ]
        gib = [or_dash(r["peak_extra_gib"]) for r in (row, plain)]
        kernels = f"{row['kernel']}, {row['biased_kernel']}"
        lines.append([*case, kernels, *pairs, *percents(row, plain), *gib, row["dense_bias_gib"]])
    header = ["GPUs", "tokens", "heads", "mask", "implementation", "kernels"]
    header += ["% of pairs by table", "% by segments"]
    header += ["fwd %", "bwd %", "fwd+bwd %", "GiB", "GiB without", "GiB of a dense bias"]
    return table(header, lines)


def _same_work(row: Row, other: Row) -> bool:
    """Return whether two rows have the same case, length, kernel and commit."""
    return all(
        row.get(name) == other.get(name)
        for name in (*CASE, "seq_len", "inner_size", "kernel", "commit")
    )


def kernels_table(rows: list[Row]) -> str:
    """Format kernels alone, in percent of the first kernel of their case."""
    first: dict[tuple, Row] = {}
    lines = []
    for row in rows:
        if row["kind"] == "kernels" and "fwd_ms" in row:
            case = tuple(row.get(name) for name in (*CASE, "seq_len", "commit"))
            limit = first.setdefault(case, row)
            facts = [tokens(row["seq_len"]), heads(row), row["mask"], row["kernel"]]
            lines.append([*facts, *rates(row), *percents(row, limit), limit["kernel"]])
    header = ["tokens", "heads", "mask", "kernel", "fwd", "bwd", "fwd+bwd"]
    header += ["fwd %", "bwd %", "fwd+bwd %", "of"]
    return table(header, lines)


def error(name: str) -> Column:
    """Return a column of errors, with a dash where there is none."""
    return lambda row: f"{row[name]:.2e}" if name in row else "-"


def error_table(rows: list[Row]) -> str:
    """Format errors against float64."""
    names = ["out", "dq", "dk", "dv", *["dtable"] * any("dtable" in row for row in rows)]
    columns: dict[str, Column] = {
        "implementation": "impl",
        "heads": lambda row: f"{row['heads']}:{row['kv_heads']}",
        "kernel": "kernel",
        "mask": "mask",
        "tokens": lambda row: tokens(row["seq_len"]),
        **{name: error(name) for name in names},
    }
    return list_rows(rows, "errors", columns, needs="dq")
