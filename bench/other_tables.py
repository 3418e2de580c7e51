"""Tables of measured rows that are not about the speed of attention, and of all rows together."""

from __future__ import annotations

from collections import defaultdict

from bench.tables import (
    Row,
    bias_table,
    error_table,
    fill,
    heads,
    kernels_table,
    one_rank_table,
    sparse_table,
    table,
    tokens,
)


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
    return table(["GPUs", "ring degree", "Ulysses degree", *cases], lines) if lines else ""


def training_table(rows: list[Row]) -> str:
    """Format the speed and memory of training."""
    lines = [
        [
            *(row[name] for name in ("model", "layers", "engine", "gpus")),
            tokens(row["seq_len"]),
            # causal is the only mask of rows that do not say it
            row.get("mask", "causal") + (", sparse" if row.get("sparse") else ""),
            checkpointing(row),
            round(row["tokens_per_s_per_gpu"]),
            *("-" if row.get(n) is None else row[n] for n in ("mfu", "peak_gib")),
            row["step_s"],
        ]
        for row in rows
        if row["kind"] == "train" and "step_s" in row
    ]
    header = ["model", "layers", "engine", "GPUs", "tokens", "mask", "checkpointing"]
    header += ["tokens/s/GPU", "MFU", "GiB", "s/step"]
    return table(header, lines) if lines else ""


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


def saving_table(rows: list[Row]) -> str:
    """Format for how long saves stopped training, and how long until they were whole."""
    names = ("model", "gpus", "checkpoint_gib", "step_s")
    lines = [
        [
            *(row[name] for name in names),
            "yes" if row["background"] else "no",
            max(row["stop_s"]),
            max(row["whole_s"]),
        ]
        for row in rows
        if row["kind"] == "saving"
    ]
    header = ["model", "GPUs", "checkpoint GiB", "s/step", "in the background", "stop s", "whole s"]
    return table(header, lines) if lines else ""


def checkpointing(row: Row) -> str:
    """Return a row's checkpointing in words."""
    words = {
        "checkpointing_blocks": "{} blocks",
        "checkpointing_every": "every {}",
        "mlp_tile": "tiles of {}",
    }
    given = (text.format(row[name]) for name, text in words.items() if row.get(name) is not None)
    offloaded = ["offloaded"] if row.get("offload") else []
    return ", ".join([row["checkpointing"], *given, *offloaded])


def planning_table(rows: list[Row]) -> str:
    """Format the milliseconds (medians) that a new mask costs a rank on the host."""
    found = [row for row in rows if row["kind"] == "planning"]
    parts = list(found[0]["ms"]) if found else []
    header = [
        "mask",
        "documents",
        "ranks",
        "backward",
        *(f"{part} ms" for part in parts),
        "all ms",
        "target ms",
    ]
    facts = ("mask", "documents", "gpus", "backward")
    lines = [
        [*(row[f] for f in facts), *row["ms"].values(), row["total_ms"], row["target_ms"]]
        for row in found
    ]
    return table(header, lines) if lines else ""


def balance_table(rows: list[Row]) -> str:
    """Format by how many percent the rank of most work exceeds the mean. The ideal is 0."""
    found = [row for row in rows if row["kind"] == "balance"]
    kinds = ("balanced", "zigzag", "contiguous")
    lines = [
        [
            row["mask"],
            row["gpus"],
            *(f"{100 * row['unevenness'][kind]:.2f}" for kind in kinds),
            "" if row["chunks"] is None else f"{100 * row['chunks']:.2f}",
            f"{1000 * row['seconds']:.1f}",
        ]
        for row in found
    ]
    return (
        table(["mask", "ranks", *kinds, "best of 12 chunks", "planning ms"], lines) if lines else ""
    )


def memory_table(rows: list[Row]) -> str:
    """Format the host's memory after many masks."""
    names = ["masks", "blocks", "blocks_more", "resident_kib", "resident_kib_more"]
    lines = [[row[name] for name in names] for row in rows if row["kind"] == "planning memory"]
    header = ["masks", "Python's blocks", "more after them", "resident KiB", "more after them"]
    return table(header, lines) if lines else ""


def timeline_table(rows: list[Row]) -> str:
    """Format the milliseconds of a forward and backward by kind of work.

    They are means over the ranks. The span is the slowest rank's.
    """
    cases: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "timeline":
            facts = (
                row["gpus"],
                tokens(row["seq_len"]),
                heads(row),
                row["mask"],
                row["impl"],
                row["kernel"],
            )
            cases[facts].append(row["ms"])
    kinds = ("attention", "merge", "other", "idle", "copies", "nccl")
    header = [
        "ranks",
        "tokens",
        "heads",
        "mask",
        "implementation",
        "kernel",
        *kinds,
        "slowest span",
    ]
    lines = [
        [
            *case,
            *(sum(ms.get(k, 0.0) for ms in ranks) / len(ranks) for k in kinds),
            max(ms["span"] for ms in ranks),
        ]
        for case, ranks in cases.items()
    ]
    return table(header, lines) if lines else ""


def host_time_table(rows: list[Row]) -> str:
    """Format the milliseconds until a forward, and a forward and backward, return to Python."""
    lines = [
        [
            row["gpus"],
            row["peers"] + (", on one GPU" if row["shared_gpu"] else ""),
            *(row[name] for name in ("tokens", "batch")),
            heads(row),
            *(row[name] for name in ("impl", "kernel", "forward_ms", "both_ms")),
        ]
        for row in rows
        if row["kind"] == "host time" and "both_ms" in row
    ]
    header = ["ranks", "peers", "tokens/GPU", "batch", "heads", "implementation", "kernel"]
    return table([*header, "fwd ms", "fwd+bwd ms"], lines) if lines else ""


def power_table(rows: list[Row]) -> str:
    """Format the power and clocks of each GPU."""
    names = ["gpu", "median_w", "limit_w", "median_sm_mhz", "max_sm_mhz", "median_celsius"]
    lines = [[round(row[name]) for name in names] for row in rows if row["kind"] == "power"]
    header = ["GPU", "median W", "limit W", "median MHz", "most MHz", "median degrees C"]
    return table(header, lines) if lines else ""


def link_table(rows: list[Row]) -> str:
    """Format the bandwidth of the links alone."""
    lines = [[r["impl"], r["message_mib"], r["gib_per_s"]] for r in rows if r["kind"] == "links"]
    return table(["way", "message MiB", "GiB/s received"], lines) if lines else ""


def value_heads_table(rows: list[Row]) -> str:
    """Format the milliseconds of values with a head size of their own, and of padded ones."""
    cases: dict[tuple, dict[bool, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "value heads":
            sizes = f"{row['head_dim']}:{row['value_dim']}"
            cases[row["seq_len"], sizes, row["heads"]][row["padded"]] = row
    lines = []
    for (seq_len, sizes, count), by in cases.items():
        times = [by[padded][name] for name in ("fwd_ms", "fwd_bwd_ms") for padded in (False, True)]
        gain = f"{100 * (times[3] / times[2] - 1):.0f} %"
        lines.append([tokens(seq_len), sizes, count, *times, gain])
    header = ["tokens", "head sizes", "heads", "fwd", "fwd, padded"]
    header += ["fwd+bwd", "fwd+bwd, padded", "faster"]
    return table(header, lines) if lines else ""


def other_tables(rows: list[Row]) -> str:
    """Format all other kinds of rows, and what could not be measured."""
    tables = {
        "Scores with a bias, beside the same pairs without": bias_table(rows),
        "USP: TFLOP/s of forward and backward": usp_table(rows),
        "Kernels alone: TFLOP/s": kernels_table(rows),
        "Values with a head size of their own: ms": value_heads_table(rows),
        "One rank with imagined peers: TFLOP/s": one_rank_table(rows),
        "Sparse attention beside dense": sparse_table(rows),
        "Training": training_table(rows),
        "Saves": saving_table(rows),
        "Where the time goes: ms": timeline_table(rows),
        "Host time of a call: ms": host_time_table(rows),
        "Power": power_table(rows),
        "A new mask's plan, on the host": planning_table(rows),
        "Work of the busiest rank above the mean: %": balance_table(rows),
        "Memory after many masks": memory_table(rows),
        "Links alone": link_table(rows),
        "Error against float64 (relative L2)": error_table(rows),
    }
    parts = [f"### {title}\n\n{text}" for title, text in tables.items() if text]
    missing = sorted({(r["impl"], r["unavailable"]) for r in rows if "unavailable" in r})
    parts += [fill(f"Not measured: {name}: {reason}") for name, reason in missing]
    return "\n\n".join(parts)
