"""Tables of measured rows that are not about the speed of attention, and of all rows together."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict

from bench.tables import (
    Column,
    Row,
    bias_table,
    error,
    error_table,
    fill,
    heads,
    kernels_table,
    list_rows,
    one_rank_table,
    or_dash,
    sparse_table,
    table,
    tokens,
)
from models.config import PRESETS


def usp_table(rows: list[Row]) -> str:
    """Format USP's TFLOP/s per GPU, forward and backward: a line for each ring degree x Ulysses
    degree, a column for each case.
    """
    found = [row for row in rows if row["kind"] == "usp" and "fwd_bwd_ms" in row]
    cells: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for row in (row for row in found if "ring_degree" in row):
        case = f"{row['mask']}, {tokens(row['seq_len'])} tokens, {heads(row)}"
        cells[row["gpus"], row["ring_degree"], row["ulysses_degree"]][case] = row
    cases = list(dict.fromkeys(case for line in cells.values() for case in line))
    lines = [
        [*cut, *(line[case]["fwd_bwd_tflops_per_gpu"] if case in line else "-" for case in cases)]
        for cut, line in cells.items()
    ]
    return table(["GPUs", "ring degree", "Ulysses degree", *cases], lines)


def training_table(rows: list[Row]) -> str:
    """Format the speed and memory of training."""
    columns: dict[str, Column] = {
        "model": "model",
        "layers": "layers",
        "engine": "engine",
        "GPUs": "gpus",
        "tokens": lambda row: tokens(row["seq_len"]),
        # rows without a mask are causal
        "mask": lambda row: row.get("mask", "causal") + (", sparse" if row.get("sparse") else ""),
        "checkpointing": checkpointing,
        "tokens/s/GPU": lambda row: round(row["tokens_per_s_per_gpu"]),
        "MFU": lambda row: or_dash(row.get("mfu")),
        "GiB": lambda row: or_dash(row.get("peak_gib")),
        "s/step": "step_s",
    }
    return list_rows(rows, "train", columns, needs="step_s")


def whole_table(rows: list[Row]) -> str:
    """Format the fastest run of each whole model and length of a sequence."""
    fastest: dict[tuple, Row] = {}
    for row in rows:
        if row["layers"] == PRESETS[row["model"]].num_layers:
            run = row["model"] + ", sparse" * bool(row.get("sparse")), row["seq_len"]
            fastest[run] = min(fastest.get(run, row), row, key=lambda row: row["step_s"])
    lines = [
        [
            model,
            tokens(seq_len),
            row["step_s"],
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['mfu']:.0%}",
            row["peak_gib"],
        ]
        for (model, seq_len), row in sorted(fastest.items(), key=lambda item: -item[0][1])
    ]
    header = ["model", "tokens of a sequence", "s a step", "tokens/s a GPU", "MFU", "GiB a GPU"]
    return table(header, lines)


def sparse_training_table(rows: list[Row]) -> str:
    """Format the tokens a second and GPU of training with dense and with sparse attention: a line
    for each run that was measured with both. Of equal runs the last one counts.
    """
    speeds: dict[tuple, dict[bool, float]] = defaultdict(dict)
    same = "model", "layers", "seq_len", "engine", "gpus", "sp", "batch_size", "mask", "dtype"
    for row in rows:
        if (speed := row.get("tokens_per_s_per_gpu")) is not None:
            run = *(row.get(name) for name in same), checkpointing(row)
            speeds[run][bool(row.get("sparse"))] = speed
    lines = []
    for (model, layers, seq_len, *_, saving), by in speeds.items():
        if len(by) == 2:
            name = f"{model}, {layers} layers, {tokens(seq_len)} tokens, {saving} checkpointing"
            gain = f"{by[True] / by[False]:.1f} x"
            lines.append([name, round(by[False]), round(by[True]), gain])
    return table(["tokens/s per GPU", "dense", "InfLLM-V2", "gain"], lines)


_OVER = {  # ways to differ -> headers of columns
    "runs": "runs",
    "runs of ranks": "runs of {} ranks",
    "batch sizes": "batch sizes",
    "ranks": "1 and {} ranks",
    "layouts": "zigzag and contiguous",
}


def bitwise_table(rows: list[Row]) -> str:
    """Format what is bitwise equal: a line for computations with the same answers, with and without
    `deterministic` unless both are equal.
    """
    found: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "bitwise":
            found[row["what"], row["deterministic"], row["over"]].append(row)
    lines: dict[str, dict[tuple, list[str]]] = defaultdict(lambda: defaultdict(list))
    for what, deterministic in dict.fromkeys(key[:2] for key in found):
        cells = (*(_equal_parts(found[what, deterministic, over]) for over in _OVER),)
        lines[what][cells].append("yes" if deterministic else "no")
    same: dict[tuple, list[str]] = defaultdict(list)
    for what, by in lines.items():
        for cells, choices in by.items():
            choice = "either" if len(choices) > 1 else choices[0] if len(by) > 1 else "-"
            same[choice, *cells].append(what)
    listed = [["; ".join(names), *cells] for cells, names in same.items()]
    ranks = max((row["gpus"] for key in found for row in found[key]), default=1)
    return table(["", "deterministic", *(x.format(ranks) for x in _OVER.values())], listed)


def _equal_parts(rows: list[Row]) -> str:
    """Return which parts are equal in all rows and, where there are digests, over all rows."""
    equal = {
        part: all(row[part] for row in rows)
        and len({row["digests"][part] for row in rows if "digests" in row}) < 2
        for part in ("forward", "gradients")
        if rows and part in rows[0]
    }
    if not equal:
        return "-"
    if len(set(equal.values())) == 1:
        return "yes" if all(equal.values()) else "no"
    return "forward" if equal["forward"] else "gradients"


def steps_table(rows: list[Row]) -> str:
    """Format whole steps before and after a change: a line for each run that both of two commits
    measured. `mixed_table` has those over packed documents.
    """
    runs: dict[tuple, list[Row]] = defaultdict(list)
    packed = _of_documents(rows)
    for row in rows:
        if row["kind"] == "steps" and row not in packed:
            runs[row["case"], row["engine"]].append(row)
    pairs = ((run, found[0], found[-1]) for run, found in runs.items() if len(found) > 1)
    lines = [
        [
            *run,
            before["commit"],
            after["commit"],
            before["step_s"],
            after["step_s"],
            f"{before['step_s'] / after['step_s']:.2f} x",
            *(or_dash(row.get("mfu")) for row in (before, after)),
            round(after["tokens_per_s"]),
            or_dash(after.get("peak_gib")),
        ]
        for run, before, after in pairs
    ]
    header = ["run", "engine", "before", "after", "s/step before", "after", "as fast"]
    return table([*header, "MFU before", "after", "tokens/s", "GiB"], lines)


def fp8_table(rows: list[Row]) -> str:
    """Format whole steps with --fp8, and the same runs without it."""
    lines = [
        [
            bf16["case"],
            bf16["step_s"],
            fp8["step_s"],
            f"{bf16['step_s'] / fp8['step_s']:.2f} x",
            round(fp8["tokens_per_s"]),
            *(or_dash(row.get("peak_gib")) for row in (bf16, fp8)),
        ]
        for bf16, fp8 in _fp8_pairs(rows)
    ]
    header = ["run", "s/step in bf16", "in float8", "as fast", "tokens/s", "GiB in bf16"]
    return table([*header, "in float8"], lines)


def _fp8_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of steps (without --fp8, with it), if there are both.

    Cases of the latter end in "-fp8".
    """
    steps = {(row["case"], row["engine"]): row for row in rows if row["kind"] == "steps"}
    pairs = [
        (steps.get((case.removesuffix("-fp8"), engine)), row)
        for (case, engine), row in steps.items()
        if row["fp8"]
    ]
    return [(bf16, fp8) for bf16, fp8 in pairs if bf16 and not bf16["fp8"]]


def single_steps_table(rows: list[Row]) -> str:
    """Format whole steps of runs that were measured once, unless another table shows them."""
    steps = [row for row in rows if row["kind"] == "steps"]
    if _compares_chunks(steps):
        return ""
    runs = Counter((row["case"], row["engine"]) for row in steps)
    paired = [row for pair in _fp8_pairs(rows) for row in pair]
    columns: dict[str, Column] = {
        "run": "case",
        "engine": "engine",
        "s/step": "step_s",
        "MFU": lambda row: or_dash(row.get("mfu")),
        "tokens/s": lambda row: round(row["tokens_per_s"]),
        "GiB": lambda row: or_dash(row.get("peak_gib")),
    }
    shown = [*paired, *_of_documents(rows)]
    single = [r for r in steps if runs[r["case"], r["engine"]] == 1 and r not in shown]
    return list_rows(single, "steps", columns)


def mixed_table(rows: list[Row]) -> str:
    """Format whole steps over packed documents: means, since batches have different documents."""
    columns: dict[str, Column] = {
        "run": "case",
        "layers": "layers",
        "groups x ranks": lambda row: f"{row['gpus'] // row['sp']} x {row['sp']}",
        "sequences at once": lambda row: or_dash(row["micro_batch_size"]),
        "s/step": lambda row: statistics.mean(_measured(row, "steps_s")),
        "fastest and slowest": lambda row: _ends(_measured(row, "steps_s")),
        "balance": lambda row: _ends(_measured(row, "balances")),
        "tokens/s": lambda row: round(
            row["batch_size"] * row["seq_len"] / statistics.mean(_measured(row, "steps_s"))
        ),
        "GiB": lambda row: or_dash(row.get("peak_gib")),
        "commit": lambda row: row["commit"][:7],
    }
    return list_rows(_of_documents(rows), "steps", columns)


def _of_documents(rows: list[Row]) -> list[Row]:
    """Return the rows of whole steps that `mixed_table` shows."""
    steps = [row for row in rows if row["kind"] == "steps"]
    return [row for row in steps if row.get("mask") == "documents" and row.get("balances")]


def _measured(row: Row, name: str) -> list[float]:
    """Return the numbers of the steps after the warm-up."""
    return row[name][row["warm_up"] :]


def _ends(values: list[float]) -> str:
    return f"{min(values):.3g}, {max(values):.3g}"


def loss_curves_table(rows: list[Row]) -> str:
    """Format the losses of runs with --fp8, and of the same runs without it: means over as many
    steps as lie between two lines.
    """
    curves = {
        r["case"]: r["losses"] for r in rows if r["kind"] == "steps" and len(r["losses"]) > 99
    }
    lines = []
    for case, fp8 in curves.items():
        if (bf16 := curves.get(case.removesuffix("-fp8"))) is fp8 or bf16 is None:
            continue
        part = len(fp8) // 6
        for last in range(part, len(fp8) + 1, part):
            means = [sum(losses[last - part : last]) / part for losses in (bf16, fp8)]
            change = f"{100 * (means[1] / means[0] - 1):+.2f}%"
            lines.append([case, f"{last - part + 1} to {last}", *means, change])
    return table(["run", "steps", "loss in bf16", "in float8", "change"], lines)


def chunks_table(rows: list[Row]) -> str:
    """Format whole steps in chunks, and what they take beside the same step without chunks."""
    steps = [row for row in rows if row["kind"] == "steps"]
    whole = {_sequence_of(row): row for row in steps if not row.get("chunk")}
    lines = []
    for row in steps if _compares_chunks(steps) else ():
        beside = whole.get(_sequence_of(row))
        gain = "-" if beside is None else f"{row['step_s'] / beside['step_s']:.2f} x"
        words = checkpointing(row)
        name = row["model"] + (", sparse" if row["sparse"] else "")
        chunk = tokens(row["chunk"]) if row["chunk"] else "-"
        facts_of_row = [name, row["layers"], row["gpus"], tokens(row["seq_len"]), chunk, words]
        lines.append([*facts_of_row, row["step_s"], gain, row["peak_gib"]])
    header = ["model", "layers", "GPUs", "tokens", "chunk", "checkpointing", "s/step"]
    return table([*header, "beside no chunks", "GiB"], lines)


def _compares_chunks(steps: list[Row]) -> bool:
    """Whether steps are those of sequences in chunks, some of them also without chunks."""
    if not any(row.get("chunk") for row in steps):
        return False
    chunked, others = (
        {_sequence_of(r) for r in steps if bool(r.get("chunk")) == x} for x in (1, 0)
    )
    return not others or not chunked.isdisjoint(others)


def _sequence_of(row: Row) -> tuple:
    facts = "model", "layers", "engine", "gpus", "seq_len"
    return *(row[name] for name in facts), bool(row["sparse"])


def _attention(row: Row) -> str:
    """Name the kinds of attention of a row's model."""
    kind = "sparse" if row["sparse"] else "dense"
    return f"lightning and {kind}" if PRESETS[row["model"]].mixers else kind


def generation_table(rows: list[Row]) -> str:
    """Format the speed of prompts and of new tokens after them."""
    words = {"prefill": "prompt", "new": "{} new tokens", "decode": "one new token"}
    columns: dict[str, Column] = {
        "model": "model",
        "attention": _attention,
        "GPUs": "gpus",
        "what": lambda row: words[row["case"]].format(row.get("new_tokens")),
        "tokens": lambda row: tokens(row["tokens"]),
        "tokens/s": lambda row: round(row["tokens_per_s"]) if "tokens_per_s" in row else "-",
        "ms": lambda row: or_dash(row.get("ms")),
    }
    return list_rows(rows, "generation", columns)


def folds_table(rows: list[Row]) -> str:
    """Format a policy's steps on completions of one prompt: a line for each way."""
    columns: dict[str, Column] = {
        "model": "model",
        "layers": "layers",
        "GPUs": "gpus",
        "prompt": lambda row: tokens(row["prompt"]),
        "completions": lambda row: f"{row['completions']} of {tokens(row['length'])}",
        "rows": "way",
        "s/step": "step_s",
        "tokens/s of completions": lambda row: round(row["completion_tokens_per_s"]),
        "GiB": lambda row: or_dash(row["peak_gib"]),
        "error of log-probabilities": lambda row: or_dash(row.get("logprob_error")),
        "of the gradient's norm": "norm_difference",
    }
    return list_rows(rows, "folds", columns)


def passes_table(rows: list[Row]) -> str:
    """Format the milliseconds of a forward and backward: a line for each pass."""
    cases: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "passes" and "ms" in row:
            cases[row["case"]][row["impl"]] = row
    names = list(dict.fromkeys(name for by in cases.values() for name in by))
    lines = [
        [
            case,
            *(by[name]["ms"] if name in by else "-" for name in names),
            *(or_dash(by[name]["extra_gib"]) if name in by else "-" for name in names),
        ]
        for case, by in cases.items()
    ]
    return table(["pass", *(f"{n}, ms" for n in names), *(f"{n}, GiB" for n in names)], lines)


def lightning_table(rows: list[Row]) -> str:
    """Format the milliseconds and memory of lightning attention, as bench/lightning.py has them."""
    columns: dict[str, Column] = {
        "case": _lightning_case,
        "contestant": "impl",
        "GPUs": "gpus",
        "tokens/GPU": lambda row: tokens(row["tokens"]),
        "heads": lambda row: f"{row['heads']} x {row['head_dim']}",
        "dtype": "dtype",
        "fwd ms": "fwd_ms",
        "fwd+bwd ms": "fwd_bwd_ms",
        "fwd+bwd ratio": lambda row: (
            f"{row['ratio']:.2f} of {row['against']}" if "ratio" in row else "-"
        ),
        "extra GiB": lambda row: or_dash(row["extra_gib"]),
    }
    return list_rows(rows, "lightning", columns, needs="fwd_bwd_ms")


def _lightning_case(row: Row) -> str:
    """Return a case in words."""
    words = {"one rank": "one rank of {size}", "layer": "layer of width {width}"}
    return words.get(row["case"], row["case"]).format_map(row)


def lightning_error_table(rows: list[Row]) -> str:
    """Format errors of lightning attention against float64."""
    columns: dict[str, Column] = {
        "contestant": "impl",
        "dtype": "dtype",
        "tokens": lambda row: tokens(row["tokens"]),
        **{name: error(name) for name in ("out", "dq", "dk", "dv")},
    }
    return list_rows(rows, "lightning", columns, needs="dq")


def checkpointing(row: Row) -> str:
    """Return a row's checkpointing in words."""
    words = {
        "checkpointing_blocks": "{} blocks",
        "checkpointing_every": "every {}",
        "mlp_tile": "tiles of {}",
    }
    given = (text.format(row[name]) for name, text in words.items() if row.get(name) is not None)
    offloaded = ["offloaded"] if row.get("offload") else []
    more = row.get("more") or []
    chunks = [f"chunks of {tokens(int(n))}" for o, n in itertools.pairwise(more) if o == "--chunk"]
    return ", ".join([row["checkpointing"], *given, *offloaded, *chunks])


def saving_table(rows: list[Row]) -> str:
    """Format how long saves stopped training, and how long they took."""
    columns: dict[str, Column] = {
        "model": "model",
        "GPUs": "gpus",
        "checkpoint GiB": "checkpoint_gib",
        "s/step": "step_s",
        "in the background": lambda row: "yes" if row["background"] else "no",
        "stop s": lambda row: max(row["stop_s"]),
        "whole s": lambda row: max(row["whole_s"]),
    }
    return list_rows(rows, "saving", columns, needs="stop_s")


def planning_table(rows: list[Row]) -> str:
    """Format the milliseconds (medians) that a new mask costs a rank on the host."""
    names = {"mask": "mask", "documents": "documents", "ranks": "gpus", "backward": "backward"}
    parts = next((row["ms"] for row in rows if row["kind"] == "planning"), {})
    columns: dict[str, Column] = {
        **names,
        **{f"{part} ms": (lambda row, part=part: row["ms"][part]) for part in parts},
        "all ms": "total_ms",
        "target ms": "target_ms",
    }
    return list_rows(rows, "planning", columns)


def balance_table(rows: list[Row]) -> str:
    """Format by how many percent the rank of most work exceeds the mean. The ideal is 0."""

    def percent(kind: str) -> Column:
        return lambda row: f"{100 * row['unevenness'][kind]:.2f}"

    columns: dict[str, Column] = {
        "mask": "mask",
        "ranks": "gpus",
        **{kind: percent(kind) for kind in ("balanced", "zigzag", "contiguous")},
        "best of 12 chunks": lambda row: (
            "" if row["chunks"] is None else f"{100 * row['chunks']:.2f}"
        ),
        "planning ms": lambda row: f"{1000 * row['seconds']:.1f}",
    }
    return list_rows(rows, "balance", columns)


def memory_table(rows: list[Row]) -> str:
    """Format the host's memory after many masks."""
    columns: dict[str, Column] = {
        "masks": "masks",
        "Python's blocks": "blocks",
        "more blocks after them": "blocks_more",
        "resident KiB": "resident_kib",
        "more KiB after them": "resident_kib_more",
    }
    return list_rows(rows, "planning memory", columns)


def timeline_table(rows: list[Row]) -> str:
    """Format the milliseconds of a forward and backward by kind of work.

    They are means over the ranks. The span is the slowest rank's.
    """
    cases: dict[tuple, list[Row]] = defaultdict(list)
    for row in (row for row in rows if row["kind"] == "timeline"):
        case = row["gpus"], tokens(row["seq_len"]), heads(row)
        cases[*case, row["mask"], row["impl"], row["kernel"]].append(row["ms"])
    kinds = ("attention", "merge", "other", "idle", "copies", "nccl")
    lines = []
    for case, ranks in cases.items():
        means = [sum(ms.get(kind, 0.0) for ms in ranks) / len(ranks) for kind in kinds]
        lines.append([*case, *means, max(ms["span"] for ms in ranks)])
    facts = ["ranks", "tokens", "heads", "mask", "implementation", "kernel"]
    return table([*facts, *kinds, "slowest span"], lines)


def host_time_table(rows: list[Row]) -> str:
    """Format the milliseconds until a forward, and a forward and backward, return to Python."""
    columns: dict[str, Column] = {
        "ranks": "gpus",
        "peers": lambda row: row["peers"] + (", on one GPU" if row["shared_gpu"] else ""),
        "tokens/GPU": "tokens",
        "batch": "batch",
        "heads": heads,
        "implementation": "impl",
        "kernel": "kernel",
        "fwd ms": "forward_ms",
        "fwd+bwd ms": "both_ms",
    }
    return list_rows(rows, "host time", columns, needs="both_ms")


def power_table(rows: list[Row]) -> str:
    """Format the power and clocks of each GPU."""
    columns: dict[str, Column] = {
        "GPU": lambda row: round(row["gpu"]),
        "median W": lambda row: round(row["median_w"]),
        "limit W": lambda row: round(row["limit_w"]),
        "median MHz": lambda row: round(row["median_sm_mhz"]),
        "most MHz": lambda row: round(row["max_sm_mhz"]),
        "median degrees C": lambda row: round(row["median_celsius"]),
    }
    return list_rows(rows, "power", columns)


def link_table(rows: list[Row]) -> str:
    """Format the bandwidth of the links alone."""
    columns: dict[str, Column] = {
        "way": "impl",
        "message MiB": "message_mib",
        "GiB/s received": "gib_per_s",
    }
    return list_rows(rows, "links", columns)


def value_heads_table(rows: list[Row]) -> str:
    """Format the milliseconds of values with a smaller head size, and of padded ones."""
    cases: dict[tuple, dict[bool, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "value heads" and "fwd_ms" in row:
            sizes = f"{row['head_dim']}:{row['value_dim']}"
            cases[row["seq_len"], sizes, row["heads"], row["kernel"]][row["padded"]] = row
    lines = []
    for (seq_len, *case), by in cases.items():
        if len(by) < 2:
            continue
        times = [by[padded][name] for name in ("fwd_ms", "fwd_bwd_ms") for padded in (False, True)]
        gain = f"{100 * (times[3] / times[2] - 1):.0f} %"
        lines.append([tokens(seq_len), *case, *times, gain])
    header = ["tokens", "head sizes", "heads", "kernel", "fwd", "fwd, padded"]
    return table([*header, "fwd+bwd", "fwd+bwd, padded", "faster"], lines)


def compare_table(rows: list[Row]) -> str:
    """Format what a change costs or gains, and the noise of both sides."""
    columns: dict[str, Column] = {
        "forward and backward": "case",
        "before ms": lambda row: row["ms"]["before"],
        "after ms": lambda row: row["ms"]["after"],
        "change": lambda row: f"{100 * row['change']:+.1f}%",
        "noise": lambda row: f"{100 * max(row['noise'].values()):.1f}%",
    }
    return list_rows(rows, "compare", columns)


def sides_table(rows: list[Row]) -> str:
    """Format a forward that sends keys beside one that sends queries."""
    columns: dict[str, Column] = {
        "heads": lambda row: f"{row['heads']}:{row['kv_heads']}",
        "queries of a GPU": lambda row: tokens(row["queries"]),
        "keys": lambda row: tokens(row["keys"]),
        "hosts": "hosts",
        "keys are sent, ms": lambda row: row["ms"]["kv"],
        "queries are sent, ms": lambda row: row["ms"]["q"],
    }
    return list_rows(rows, "sides", columns)


def ring_table(rows: list[Row]) -> str:
    """Format the variants of a ring, a line for each case and variant that differs from others."""
    lines = []
    for row in (row for row in rows if row["kind"] == "ring"):
        case = f"{row['heads']}:{row['kv_heads']}", tokens(row["tokens"]), row["hosts"]
        base = next(iter(row["variants"].values()))["ms"]
        for name, found in row["variants"].items():
            if "ms" in found:
                shares = (f"{x:.1%}" for x in (found["ms"] / base - 1, found["range_ms"] / base))
                shown = name, found["shape"], found["ms"], *shares, or_dash(found["extra_gib"])
                lines.append([*case, *shown])
    columns = "heads", "tokens of a GPU", "hosts", "variant", "passes x [hops of stages]"
    return table([*columns, "ms", "change", "range", "GiB"], lines)


def trainers_table(rows: list[Row]) -> str:
    """Format the speed and the memory of trainers over ranks."""
    columns: dict[str, Column] = {
        "trainer": "case",
        "GPUs": "gpus",
        "tokens": lambda row: tokens(row["seq_len"]),
        "vocabulary": "vocab_size",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "peak GiB": "peak_gib",
        "whole logits GiB": "whole_logits_gib",
    }
    return list_rows(rows, "trainers", columns)


TABLES = {
    "What is bitwise equal": bitwise_table,
    "Scores with a bias, compared with the same pairs without one": bias_table,
    "USP: TFLOP/s of forward and backward": usp_table,
    "Kernels alone: TFLOP/s": kernels_table,
    "Values with a smaller head size: ms": value_heads_table,
    "One rank with imagined peers: TFLOP/s": one_rank_table,
    "Sparse and dense attention": sparse_table,
    "Training": training_table,
    "Whole steps before and after": steps_table,
    "Whole steps": single_steps_table,
    "Whole steps over packed documents": mixed_table,
    "Whole steps in float8": fp8_table,
    "Losses in float8": loss_curves_table,
    "Steps in chunks": chunks_table,
    "Prompts and new tokens": generation_table,
    "Completions of one prompt": folds_table,
    "Passes and the loss": passes_table,
    "Lightning attention": lightning_table,
    "Lightning attention: error against float64 (relative L2)": lightning_error_table,
    "Trainers": trainers_table,
    "Saves": saving_table,
    "Where the time goes: ms": timeline_table,
    "Host time of a call: ms": host_time_table,
    "Power": power_table,
    "A change": compare_table,
    "A chunk's forward": sides_table,
    "Stages and passes of a ring": ring_table,
    "A new mask's plan, on the host": planning_table,
    "Work of the busiest rank above the mean: %": balance_table,
    "Memory after many masks": memory_table,
    "Links alone": link_table,
    "Error against float64 (relative L2)": error_table,
}


def other_tables(rows: list[Row]) -> str:
    """Format all other kinds of rows, what could not be measured, and runs that failed."""
    texts = {title: make(rows) for title, make in TABLES.items()}
    parts = [f"### {title}\n\n{text}" for title, text in texts.items() if text]
    missing = sorted({(r["impl"], r["unavailable"]) for r in rows if "unavailable" in r})
    parts += [fill(f"Not measured: {name}: {reason}") for name, reason in missing]
    parts += [
        fill(
            f"Failed: {row['model']}, {tokens(row['seq_len'])} tokens: {_last_words(row['error'])}"
        )
        for row in rows
        if "error" in row
    ]
    return "\n\n".join(parts)


def _last_words(printed: str) -> str:
    """Return the last line that has letters, which torchrun may have put behind "traceback"."""
    lines = (x.strip().removeprefix("traceback : ") for x in reversed(printed.splitlines()))
    return next((line for line in lines if re.search("[a-z]", line)), "without a message")
