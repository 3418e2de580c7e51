"""The benchmark as a newcomer runs it: on a machine without GPUs a tiny version."""

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import flash_attn_interface, mixed, other_tables, tables, training
from bench.balance import least, unevenness
from bench.balance import masks as balanced_masks
from bench.implementations import Case
from bench.masks import PACKINGS, draw_document, draw_piece, mask_of, packing, share_of
from bench.sparse import SparseCase, count_overlap
from bench.tables import read_rows
from bmt_burst import InfLLMV2, Layout, Mask
from tests.cases import random_qkv
from tests.launcher import ROOT, run_script
from tests.reference import assert_close, dense_results
from tests.test_data import prepare

KEYS = "kind impl gpus gpu_name seq_len batch heads kv_heads head_dim mask kernel versions commit "
KEYS += "fwd_ms bwd_ms fwd_bwd_ms visible_pairs peak_extra_gib fwd_tflops_per_gpu "
KEYS = {*KEYS.split(), "bwd_tflops_per_gpu", "fwd_bwd_tflops_per_gpu"}
SMALL = {"block_size": 4, "kernel_size": 4, "kernel_stride": 2, "window_size": 4, "topk": 3}


def on_cpus(test):
    """Mark a test that runs a whole benchmark, of a tiny size if there are no GPUs."""
    no_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it really measures")
    return pytest.mark.slow(no_gpus(test))


def measure(size, command, folder):
    """Run a script with its options on `size` ranks, and return its rows."""
    script, *options = shlex.split(command)
    output = folder / "rows.jsonl"
    code, printed = run_script(size, f"bench/{script}", *options, "--output", output)
    assert code == 0, printed
    return read_rows([output])


@on_cpus
def test_benchmark_runs_and_reports(tmp_path):
    others = "'bmt_burst low memory' all-gather ulysses 'naive ulysses' 'ring_flash_attn zigzag'"
    command = f"attention.py --tokens-per-gpu 32 --implementations bmt_burst {others}"
    measure(2, command, tmp_path)
    masks = "--masks causal documents window --documents long --windows 40 --no-links"
    command = f"attention.py --tokens-per-gpu 64 --implementations bmt_burst {masks}"
    rows = measure(2, command, tmp_path)
    measured = [r for r in rows if r["kind"] == "attention" and "unavailable" not in r]
    assert all(r.keys() >= KEYS for r in measured)
    expected = {"kernel alone", "bmt_burst", *shlex.split(others)[:-1]}
    assert {r["impl"] for r in measured if r["mask"] == "causal"} == expected
    for mask in ("documents long", "window 40"):
        assert {r["impl"] for r in measured if r["mask"] == mask} == {"bmt_burst", "kernel alone"}
    wrong = [r for r in rows if r["kind"] == "errors" and "unavailable" not in r]
    assert max(r[name] for r in wrong for name in ("out", "dq", "dk", "dv")) < 1e-5
    header = "| 128 tokens | kernel | documents long | window 40 |\n"
    assert tables.masks_table(rows).startswith(header)
    code, report = run_script(None, "bench/report.py", tmp_path / "rows.jsonl")
    assert code == 0, report
    assert "### 2 ranks, batch 1, 4:2 heads of 16, documents long" in report
    assert "% of kernel alone" in report
    assert "Not measured: ring_flash_attn zigzag" in report
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@on_cpus
def test_one_rank_of_many(tmp_path):
    options = "--size 8 --ranks 0 7 --masks causal documents --documents 1K"
    rows = measure(1, f"one_rank.py {options} --variants bmt_burst ulysses usp", tmp_path)
    ranks = [(r["mask"], r["rank"], r["impl"]) for r in rows if "rank" in r]
    variants = ("usp", "bmt_burst", "ulysses")  # the first one is not measured
    assert ranks == [*itertools.product(("causal", "documents 1K"), (0, 7), variants)]
    assert {r["impl"] for r in rows if "unavailable" in r} == {"usp"}
    assert tables.one_rank_table(rows).count("| 8 | 1 | 4:2 x 16 |") == 4


@on_cpus
def test_sparse_and_dense_attention(tmp_path):
    rows = measure(2, "sparse.py --cases one-rank ring --lengths 64 256", tmp_path)
    assert all(r.keys() >= KEYS for r in rows)
    places = [("imagined", 8, 64), ("imagined", 8, 256), ("real", 2, 256), ("imagined", 2, 256)]
    impls = ["sparse, 80% overlap", "sparse, random", "dense"]
    found = [(r["peers"], r["gpus"], r["seq_len"], r["impl"]) for r in rows]
    assert found == [(*place, impl) for place in places for impl in impls]
    for row in rows:
        if row["impl"] == "dense" or row["seq_len"] == 64:  # such a short call is dense
            assert row["visible_pairs"] == Mask.causal(row["seq_len"]).area
            assert row.get("overlap") is None
        elif row["impl"] == "sparse, random":
            assert row["overlap"] < 0.6
        else:  # of so few queries
            assert row["overlap"] == pytest.approx(0.8, abs=0.1)
            assert row["visible_pairs"] < Mask.causal(256).area
    assert tables.sparse_table(rows).count("\n| one rank of 8 | 1 | 64 | 4:2 x 16 | ") == 3


@pytest.mark.parametrize("line", ['{"kind": "steps"}', "{", "[0]"])
def test_a_report_names_a_row_without_facts(line, tmp_path):
    (file := tmp_path / "rows").write_text(f'{{"commit": "a", "gpu_name": "b"}}\n{line}\n')
    code, printed = run_script(None, "bench/report.py", file)
    lacks = "a row with 'commit', got one with ['kind']" if "kind" in line else "a row of JSON, got"
    assert code == 2 and f"error: {file}, row 2: expected {lacks}" in printed
    assert other_tables.passes_table([{"kind": "passes", "unavailable": "no GPU"}]) == ""


def test_overlap_counts_blocks_chosen_by_score():
    sparse = InfLLMV2(**SMALL, dense_len=-1)
    # All queries of block 9 choose 0, 8 and 9, which do not count.
    chosen = [[0, 3, 8, 9], [0, 3, 8, 9], [0, 4, 8, 9], [0, 7, 9, 10]]
    blocks = torch.tensor(chosen, dtype=torch.int32).view(1, 4, 1, 4)
    # The second query chooses 3 again, the third does not. The last one is not next to the third.
    positions = torch.tensor([36, 37, 38, 43])
    assert count_overlap(blocks, positions, sparse).tolist() == [1.0, 2.0]
    # a query that sees no more than it chooses is not counted
    assert count_overlap(blocks, torch.tensor([4, 5, 6, 7]), sparse).tolist() == [0.0, 0.0]


def test_flops_are_those_of_visible_and_of_chosen_pairs():
    case = Case(64, 3, 4, 2, 16, "window 10", "auto")
    assert case.flops == 4 * 16 * 4 * 3 * int(Mask.window(64, 10).dense().sum())
    sparse = InfLLMV2(**SMALL, dense_len=30)
    case = SparseCase(30, 3, 4, 2, 16, "causal", "auto", sparse=sparse)
    pairs = sum(min(i + 1, 3 * 4 + i % 4 + 1) for i in range(30))
    assert (case.pairs, case.flops) == (pairs, 4 * 16 * 4 * 3 * pairs)
    assert SparseCase(29, 3, 4, 2, 16, "causal", "auto", sparse=sparse).pairs == 29 * 15


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize(("seq_len", "ranks"), [(65536, 8), (100, 3)])
def test_a_kernel_alone_has_a_ranks_tokens_and_as_many_pairs(name, seq_len, ranks):
    lengths = packing(name, seq_len)
    # the same in every process: the generator's seed is a text
    assert lengths == packing(name, seq_len)
    assert sum(lengths) == seq_len
    assert max(lengths) <= (3 * seq_len // 4 if name == "long" else seq_len // 4)
    whole = mask_of(f"documents {name}", seq_len)
    share = share_of(f"documents {name}", seq_len, ranks)
    assert share.seq_len == seq_len // ranks
    if name in ("long", "magi") and seq_len > 100:
        assert share == Mask.causal(seq_len // ranks)  # no whole document comes nearer
    elif seq_len > 100:
        # a few long documents have most of the pairs of "700", so few shares come near the mean
        assert abs(share.area * ranks / whole.area - 1) < (0.05 if name == "700" else 0.025)


def test_magi_documents_are_pieces_of_the_published_lengths():
    ends = [10, 50, 100, 200, 500, *(1 << power for power in range(10, 18)), 192 << 10]
    shares = [0.2, 2.9, 5.2, 10.2, 28.2, 24.6, 15.7, 7.3, 3.1, 1.3, 0.85, 0.14, 0.17, 0.14]
    rng = random.Random(0)
    whole = [draw_document(192 << 10, rng) for _ in range(20000)]
    pieces = [draw_piece(8192, rng) for _ in range(20000)]
    for low, end, share in zip([0, *ends], ends, shares, strict=False):
        expected = share / sum(shares)
        found = sum(low < x <= end for x in whole) / len(whole)
        # four standard deviations of a count
        assert abs(found - expected) <= 4 * (expected / len(whole)) ** 0.5, end
    cut = [min(length - start, 8192) for length in whole for start in range(0, length, 8192)]
    expected, found = (sum(x == 8192 for x in each) / len(each) for each in (cut, pieces))
    assert max(pieces) == 8192
    assert abs(found - expected) <= 6 * (expected / len(pieces)) ** 0.5, "both are drawn"
    tokens = [len(text) + 2 for text in mixed.documents(20000, 200)]  # with its begin and its end
    assert (min(tokens), max(tokens) > 150, max(tokens) <= 200) == (100, True, True)
    assert sum(tokens) - tokens[-1] < 20000 <= sum(tokens)


def test_the_stand_in_of_flash_attn_computes_attention():
    *qkv, dout = tensors = random_qkv(2, 12, 4, 2, 8, torch.float32)
    inputs, options = dict(zip("qkv", qkv, strict=True)), {"softmax_scale": 0.3, "causal": True}
    out, lse, *_ = flash_attn_interface._flash_attn_forward(**inputs, **options)
    into = {f"d{name}": torch.full_like(x, torch.nan) for name, x in inputs.items()}
    # ring-flash-attn passes transposed rows, and options that are not used
    options |= {"softmax_lse": lse.mT.contiguous().mT, "dropout_p": 0.0, "alibi_slopes": None}
    flash_attn_interface._flash_attn_backward(dout=dout, out=out, **inputs, **into, **options)
    exact = dense_results(Mask.causal(12), tensors, 0.3)
    assert_close([out, lse, *into.values()], exact, dout, 0.3, 1e-5)


@on_cpus
def test_slow_calls_are_measured_once_and_usp_on_four_ranks(tmp_path):
    options = "--slow-ms 0 --errors 128 --no-links --implementations bmt_burst usp"
    rows = measure(4, f"attention.py --masks causal --tokens-per-gpu 32 {options}", tmp_path)
    found = {r["impl"]: r for r in rows if r["kind"] == "attention"}
    assert found.keys() == {"kernel alone", "bmt_burst", "usp"}
    for row in found.values():
        assert row["rounds"] == {name: [row[name]] for name in ("fwd_ms", "fwd_bwd_ms")}
    header, _, *lines = tables.strategies_table(rows).splitlines()
    assert header == "| tokens of a GPU | kernel | causal, 32 |"
    assert [line.split(" | ")[0] for line in lines] == ["| kernel alone", "| bmt_burst", "| usp"]
    assert lines[-1].endswith("%) |")
    (wrong,) = [r for r in rows if r["kind"] == "errors" and r["impl"] == "usp"]
    assert max(wrong[name] for name in ("out", "dq", "dk", "dv")) < 1e-5


@on_cpus
def test_a_bias_is_measured(tmp_path):
    names = ["bmt_burst", "bmt_burst without a bias", "ulysses", "torch context_parallel"]
    options = f"--masks bee --no-links --implementations {shlex.join(names)}"
    rows = measure(2, f"attention.py --heads 4:2 {options}", tmp_path)
    found = [r for r in rows if r["kind"] == "attention" and "unavailable" not in r]
    measured = {r["impl"]: r for r in found}
    assert measured.keys() == {*names[:3], "kernel alone"}
    for impl in names[:3]:
        row = measured[impl]
        assert row["visible_pairs"] == mask_of("bee", 128).area
        if impl == names[1]:
            assert not row.keys() & {"bias_rows", "dense_bias_gib"}
        else:
            assert (row["bias_rows"], row["biased_kernel"]) == (512, "reference")
            assert row["dense_bias_gib"] == 128 * 128 * 4 * 2 / 2**30
            assert 0 < row["segment_pairs"] <= row["own_row_pairs"] <= row["visible_pairs"]
    wrong = [r for r in rows if r["kind"] == "errors" and "unavailable" not in r]
    assert {r["impl"] for r in wrong if "dtable" in r} == {"bmt_burst", "ulysses"}
    errors = [r.get(name, 0) for r in wrong for name in ("out", "dq", "dk", "dv", "dtable")]
    assert max(errors) < 1e-5
    assert tables.bias_table(rows).count("\n| 2 | 128 | ") == 2
    assert tables.error_table(rows).splitlines()[0].endswith(" | dtable |")


@on_cpus
def test_kernels_take_turns(tmp_path):
    command = "kernels.py --kernels cpu reference triton --head-dim 24 --heads 4:4 4:2"
    rows = measure(1, command, tmp_path)
    measured = [r for r in rows if "unavailable" not in r]
    assert all(r.keys() >= KEYS for r in measured)
    found = [(r["kv_heads"], r["kernel"]) for r in measured]
    assert found == [*itertools.product((4, 2), ("cpu", "reference"))]
    assert all("not on a GPU" in r["unavailable"] for r in rows if r["kernel"] == "triton")
    # a backward's time is a difference, so on a busy machine it may be negative and have no rate
    rates = r" \| 100 \| (?:100|nan) \| 100 \| cpu \|"
    assert len(re.findall(rates, tables.kernels_table(rows))) == 2
    rows = measure(1, "kernels.py --kernels cpu --head-dim 24 --value-dim 16", tmp_path)
    assert "\n| 64 | 24:16 | 4 | cpu | " in other_tables.value_heads_table(rows)


@on_cpus
def test_lightning_attention(tmp_path):
    rows = measure(2, "lightning.py --cases documents layer one-rank ranks errors", tmp_path)
    measured = {(r["case"], r["impl"]): r for r in rows}
    assert [name for _, name in measured] == [
        *("one document", "8 documents", "five projections", "layer"),
        *("alone", "rank 0", "rank 4", "rank 7", "alone", "zigzag"),
        *("bmt_burst", "bmt_burst, 2 ranks"),
    ]
    for row in rows:
        if row["case"] == "errors":
            assert all(0 < row[name] < 1e-6 for name in ("out", "dq", "dk", "dv", "dv_max"))
        elif "against" in row:
            base = measured[row["case"], row["against"]]
            assert row["ratio"] == row["fwd_bwd_ms"] / base["fwd_bwd_ms"]
    table = other_tables.lightning_table(rows)
    assert table.count("\n| one rank of 8 | ") == 4
    assert "\n| layer of width 64 | layer | 1 | 128 | 4 x 16 | float32 | " in table
    assert "\n| ranks | zigzag | 2 | 128 | " in table and table.count(" of alone | ") == 4
    assert "\n| bmt_burst, 2 ranks | float32 | 128 | " in other_tables.lightning_error_table(rows)
    one = measure(None, "lightning.py --cases kernel", tmp_path)[len(rows) :]
    assert [(r["tokens"], r["impl"]) for r in one] == [(128, "bmt_burst"), (256, "bmt_burst")]


@on_cpus
def test_bits_are_compared(tmp_path):
    """Over two ranks. tests/test_bitwise.py has the results."""
    rows = measure(2, "bitwise.py --seq-len 24", tmp_path)
    assert {r["kernel"] for r in rows if r["deterministic"]} == {"cpu"}
    table = other_tables.bitwise_table(rows)
    assert "| AdamW | - | yes | yes | - | yes | yes |" in table
    assert "| runs of 2 ranks | batch sizes | 1 and 2 ranks |" in table


@on_cpus
def test_host_time_of_real_and_imagined_peers(tmp_path):
    measure(2, "host_time.py --tokens-per-gpu 32 --strategies ring", tmp_path)
    imagined = "host_time.py --imagined 8 --tokens-per-gpu 32 --strategies ring ulysses"
    rows = measure(1, imagined, tmp_path)
    found = [(r["gpus"], r["peers"], r["strategy"]) for r in rows]
    assert found == [(2, "real", "ring"), (8, "imagined", "ring"), (8, "imagined", "ulysses")]
    assert all(r["forward_ms"] > 0 and not r["shared_gpu"] for r in rows)
    table = other_tables.host_time_table(rows)
    assert table.count("| imagined | 32 | 1 | 4:2 x 16 | bmt_burst ") == 2


@on_cpus
def test_training_benchmark_of_cpm_bee(tmp_path):
    options = "--layers 2 --seq-len 256 --steps 3 --warm-up 1 --checkpointing none full"
    for size in (1, 2):
        rows = measure(size, f"live_training.py --models cpm-bee-tiny {options}", tmp_path)
        line = f" | 2 | torch | {size} | 256 | packed instances | "
        assert other_tables.training_table(rows).count(line) == 2
    assert all(row["targets"] > 0 for row in rows)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)


@pytest.mark.slow
def test_balance():
    """No layout is below the ideal, and balanced is near it for every mask."""
    for name, mask in balanced_masks(12 * 400).items():
        layouts = Layout.balanced(mask, 3), Layout.contiguous(mask.seq_len, 3)
        evened, contiguous = (unevenness(mask, layout, 3) for layout in layouts)
        assert 0 <= evened < 0.02, name
        assert -1e-9 <= least(mask, 3) <= contiguous + 1e-9, name


DRIVER = """
import sys
sys.path.insert(0, {root!r})
from bench import attention, implementations

def work(q, k, v):
    if attention.dist.get_rank() in {failing}:
        raise MemoryError("no memory left")
    return q * k * v

made = implementations.Implementation("contiguous", lambda case, sp, layout: work)
implementations.IMPLEMENTATIONS["ulysses"] = made
attention.main()
"""


@on_cpus
@pytest.mark.parametrize(("failing", "expected"), [([0, 1], 0), ([1], 1)])
def test_an_implementation_that_fails_does_not_end_the_others(tmp_path, failing, expected):
    """But for those that wait for a rank that failed alone."""
    driver, output = tmp_path / "driver.py", tmp_path / "rows.jsonl"
    driver.write_text(DRIVER.format(root=str(ROOT), failing=failing))
    options = ["--heads", "2:2", "--implementations", "ulysses", "bmt_burst"]
    code, printed = run_script(2, driver, *options, "--output", output)
    assert code == expected, printed
    if code:
        assert "failures by rank: [None, 'MemoryError: no memory left']" in printed
        return
    rows = read_rows([output])
    reasons = {r["unavailable"] for r in rows if r["impl"] == "ulysses"}
    assert reasons == {"MemoryError: no memory left"}
    assert {r["kind"] for r in rows if r["impl"] == "bmt_burst"} == {"attention", "errors"}


# In place of python3: answers which GPUs there are, notes the commands that would run a script, and
# makes the files that they would write outside of the repository.
NOTED = """#!/usr/bin/env bash
[ "$1" != -c ] || {{ {answer}; exit; }}
printf '%s\\n' "$@" "" >> {lines}
while [ $# -gt 0 ]; do case "$1 $2" in "--output /"*) touch "$2" ;; esac; shift; done
"""
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run_bash(*command: str, **environment: str) -> subprocess.CompletedProcess:
    options = {"env": os.environ | environment, "capture_output": True, "text": True}
    return subprocess.run(["bash", *command], cwd=ROOT, **options)


def run_bench(folder, answer, *options):
    """Run bench.sh with such a python3. Return how it ended, and the commands that it would run."""
    python, lines = folder / "python3", folder / "lines"
    python.write_text(NOTED.format(answer=answer, lines=lines))
    python.chmod(0o755)
    lines.write_text("")
    changed = {"VIRTUAL_ENV": sys.prefix, "TMPDIR": str(folder)}
    changed["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = run_bash("bench/bench.sh", *options, **changed)
    noted = lines.read_text().removesuffix("\n\n").split("\n\n")
    return done, [line.split("\n") for line in noted]


def test_quick_measures_four_implementations_and_all_of_them_on_request(tmp_path):
    done, [run] = run_bench(tmp_path, "echo 2 nvidia-h100", "--quick")
    assert done.returncode == 0, done.stderr
    assert run[:6] == [*LAUNCHER, "2", "bench/attention.py"]
    sizes = ["--tokens-per-gpu", "8192", "32768", "--heads", "32:8"]
    peers = ["bmt_burst", "ulysses", "torch context_parallel"]  # and the kernel alone
    assert run[8:] == [*sizes, "--implementations", *peers, "--no-links"]
    _, [everything, masks] = run_bench(tmp_path, "echo 2 nvidia-h100", "--quick", "--all")
    assert "--implementations" not in everything
    assert "documents" in masks
    _, [dense, imagined] = run_bench(tmp_path, "echo 1 nvidia-h100", "--quick")
    assert dense[8:] == [*sizes, "--implementations", "bmt_burst"]
    assert imagined[8:] == [*sizes, "--variants", "bmt_burst"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("bench.sh --usp --gpus 1", "needs two or more, not 1"),
        ("bench.sh --two-hosts --gpus 5", "4 or more, not 5"),
        ("bench.sh --quick --usp", "usage: "),
        ("bench.sh --all", "usage: "),
        ("attention.py --windows 0", "--windows: expected a whole number, 1 or more, got '0'"),
        ("attention.py --heads 6:4", "--heads: expected query heads and kv heads that divide them"),
        ("compare.py --before tests", "--before: expected a checkout with tests/bmt_burst/"),
        ("generation.py new:1 x:2", "expected prefill, new or decode, and tokens, as in"),
        ("mixed.py --output tests", "--output: expected a file that can be written, got 'tests'"),
        ("one_rank.py --ranks 0 9 --size 9", "--ranks: expected ranks below --size, 9, got [9]"),
        ("sparse.py --rank -1", "--rank: expected a whole number, 0 or more, got '-1'"),
        ("sparse.py --sparse 3", "--sparse: '3': expected names and values, got 3"),
        ("steps.py --commit a --engine torch --warm-up -1 b=", "--warm-up: expected 0 or more"),
        ("steps.py --commit a --engine torch --tree docs b=", "--tree: expected a checkout of"),
    ],
)
def test_wrong_options_are_refused(command, reason, tmp_path):
    """By bench.sh before Python runs, which may first have to be installed."""
    script, *given = shlex.split(command)
    if script == "bench.sh":
        done, _ = run_bench(tmp_path, "echo python ran >&2", *given)
        code, printed = done.returncode, done.stderr
    else:
        output = ["--output", tmp_path / "rows"]
        code, printed = run_script(None, f"bench/{script}", *output, *given)
    assert (code, reason in printed, "python ran" in printed) == (2, True, False), printed


def two_hosts(rank: int, size: int, *command: str) -> subprocess.CompletedProcess:
    """A command as two_hosts.sh starts it on a rank."""
    places = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return run_bash("bench/two_hosts.sh", *command, **places)


@on_cpus
def test_benchmark_of_two_hosts(tmp_path):
    """What bench.sh would run, by ranks that have imported torch already."""
    done, [*runs, report] = run_bench(tmp_path, f'exec {sys.executable} "$@"', "--two-hosts")
    assert done.returncode == 0, done.stderr
    names = [two_hosts(rank, 4, "printenv", "NCCL_HOSTID").stdout.strip() for rank in range(4)]
    hosts = [{"NCCL_HOSTID": name} for name in names]
    launcher = [*LAUNCHER, "4", "--no-python", "bench/two_hosts.sh", "python3"]
    assert [run[: len(launcher)] for run in runs] == [launcher] * 2
    one_ring, double_ring = (run[len(launcher) :] for run in runs)
    assert "--inner-size" in one_ring
    code, printed = run_script(4, *double_ring, environments=hosts)
    assert code == 0, printed
    assert printed.count(" hosts=2 inner_size=2 ") == 2
    code, printed = run_script(None, *report)
    assert code == 0, printed
    for ring in ("q, double ring", "kv, double ring"):
        assert f"| 256 | bmt_burst {ring} |" in printed
    two = two_hosts(0, 2, "true")
    assert (two.returncode, "4 or more, not 2" in two.stderr) == (2, True)


@on_cpus
def test_benchmark_of_usp(tmp_path):
    """Every way to cut four ranks is measured, and has a line in the table."""
    rows = measure(4, "usp.py --tokens-per-gpu 32", tmp_path)
    found = [r["impl"] for r in rows if "ring_degree" in r and "fwd_ms" in r]
    assert found == ["usp 4 x 1", "usp 2 x 2", "usp 1 x 4"]
    lines = other_tables.usp_table(rows).splitlines()
    assert lines[0].startswith("| GPUs | ring degree | Ulysses degree | causal, 128 tokens, 4:2 x")
    assert [line[:13] for line in lines[2:]] == ["| 4 | 4 | 1 |", "| 4 | 2 | 2 |", "| 4 | 1 | 4 |"]


def launch(command, **options) -> subprocess.CompletedProcess:
    """Run a script with torchrun's arguments. Its ranks are forked, since importing torch takes
    seconds. test_interrupts.py has a run of pretrain.py with the same arguments under torchrun.
    """
    assert command[:5] == [sys.executable, *LAUNCHER]
    assert options == {"capture_output": True, "text": True}
    size, script, *flags = command[5:]
    code, printed = run_script(int(size), script, *flags)
    return subprocess.CompletedProcess(command, code, printed, "")


@on_cpus
def test_training_benchmark(tmp_path, monkeypatch):
    (tmp_path / "text.jsonl").write_text('{"text": "a document"}\n' * 500)
    prepare("--input", tmp_path / "text.jsonl", "--output", tmp_path / "data")
    monkeypatch.setattr(training, "subprocess", SimpleNamespace(run=launch))
    files = f"--data {tmp_path}/data/train --output {tmp_path}/rows.jsonl"

    def benchmark(options):
        monkeypatch.setattr(sys, "argv", ["bench/training.py", *shlex.split(options)])
        return training.main()

    full = "--gpus 2 --checkpointing full --checkpointing-every 2 --mlp-tile 9"
    more = ["--layout", "striped", "--documents", "mask"]
    options = f"{full} {files} --seq-len 64 --steps 4 --layers 2 -- {shlex.join(more)}"
    code, [row] = benchmark(options), read_rows([tmp_path / "rows.jsonl"])
    assert code == 0, row
    assert (row["kind"], row["layers"], row["sp"], row["seq_len"]) == ("train", 2, 2, 64)
    assert (row["checkpointing"], row["more"], len(row["losses"])) == ("full", more, 4)
    assert row.keys() >= {"engine", "tokens_per_s_per_gpu", "step_s", "versions", "commit"}
    shown = "| cpm-tiny | 2 | torch | 2 | 64 | documents | full, every 2, tiles of 9 | "
    assert shown in other_tables.training_table([row])
    small = SMALL | {"dense_len": 32}
    once = "--gpus 1 --checkpointing full unknown --seq-len 64 --layers 1 --steps 2 --warm-up 1"
    options = f"{once} {files} --sparse '{json.dumps(small)}' -- --documents ignore"
    assert benchmark(options) == 1
    _, row, failed = read_rows([tmp_path / "rows.jsonl"])
    assert "invalid choice: 'unknown'" in failed["error"]
    assert "Failed: cpm-tiny, 64 tokens: run_script: " in other_tables.other_tables([failed])
    assert row["sparse"] == InfLLMV2(**small).to_dict()
    shown = "| cpm-tiny | 1 | torch | 1 | 64 | causal, sparse | full | "
    assert shown in other_tables.training_table([row])


@on_cpus
def test_two_checkouts_are_compared(tmp_path):
    [row] = measure(2, f"compare.py --before {ROOT} --tokens-per-gpu 32", tmp_path)
    assert len(row["rounds"]["before"]) == len(row["rounds"]["after"]) == 6
    assert row["change"] == pytest.approx(row["ms"]["after"] / row["ms"]["before"] - 1)


@on_cpus
def test_rings_that_send_either_side_in_other_stages(tmp_path):
    [row] = measure(2, "sides.py", tmp_path)
    assert row["ms"].keys() == {"kv", "q"}
    assert "| 4:2 | 16 | 128 | 1 |" in other_tables.sides_table([row])
    *_, row = measure(2, "ring.py --rounds 1", tmp_path)
    assert row["variants"]["144 MiB"]["shape"] == "kv 2 x [1], kv 2 x [1]"
    assert "| 4:2 | 16 | 1 | ring | kv 1 x [1], kv 1 x [1] |" in other_tables.ring_table([row])


@on_cpus
def test_completions_as_separate_rows_and_folded(tmp_path):
    separate, folded = rows = measure(2, "folds.py --rounds 1", tmp_path)
    assert (separate["tokens"], folded["tokens"]) == (3 * (64 + 16), 63 + 3 * 17)
    # both are relative, and fp32 sums of 384 terms
    assert max(folded["logprob_error"], folded["norm_difference"]) < 1e-4
    assert "| cpm-tiny | 4 | 2 | 64 | 3 of 16 | folded |" in other_tables.folds_table(rows)


@on_cpus
def test_whole_steps_of_two_checkouts(tmp_path):
    """Both checkouts are this one."""
    file = tmp_path / "text.jsonl"
    run_script(None, "bench/mixed.py", "--tokens", 2000, "--longest", 100, "--output", file)
    prepare("--input", file, "--output", tmp_path / "data")
    options = f"--model cpm-tiny --data {tmp_path}/data/train --seq-len 64 --batch-size 2 --steps 2"
    for commit in ("before", "after"):
        command = f"steps.py --commit {commit} --engine torch --warm-up 1"
        saving = "--checkpointing selective --checkpointing-blocks 1 --output /nowhere"
        dense = f"dense={options} --documents ignore"
        runs = shlex.join([dense, f"two={options} --sp-size 2 {saving}"])
        rows = measure(2, f"{command} {runs}", tmp_path)
    assert [row["case"] for row in rows] == ["dense", "two"] * 2
    assert rows[0]["losses"] == rows[2]["losses"]
    assert len(rows[0]["losses"]) == len(rows[0]["steps_s"]) == 2
    assert "| dense | torch | before | after |" in other_tables.steps_table(rows)
    assert [row["checkpointing_blocks"] for row in rows] == [None, 1] * 2
    assert other_tables.single_steps_table(rows) == ""
    assert "\n| dense | torch | " in other_tables.single_steps_table(rows[:2])
    assert [len(row["balances"]) for row in rows] == [2] * 4
    [line] = other_tables.mixed_table(rows[:2]).splitlines()[2:]
    assert line.startswith("| two | 4 | 1 x 2 | - | ") and line.endswith(" | before |")


STEPS = {"kind": "steps", "model": "cpm", "engine": "torch", "fp8": False, "sparse": None}


def test_steps_over_documents_are_means_after_the_warm_up():
    row = STEPS | {"case": "sp2", "layers": 4, "gpus": 4, "sp": 2, "mask": "documents"}
    row |= {"micro_batch_size": 1, "batch_size": 4, "seq_len": 300, "commit": "d12d0021"}
    row |= {"warm_up": 1, "steps_s": [9.0, 1.0, 2.0], "balances": [4.0, 1.25, 1.5]}
    assert other_tables.mixed_table([row]).splitlines()[2:] == [
        "| sp2 | 4 | 2 x 2 | 1 | 1.5 | 1, 2 | 1.25, 1.5 | 800 | - | d12d002 |"
    ]
    assert other_tables.single_steps_table([row]) == other_tables.steps_table([row, row]) == ""


def test_each_step_is_in_one_table():
    """A step with --fp8 belongs to the run of its engine, and steps of a sequence with and without
    chunks to a table of all.
    """
    dense = STEPS | {"case": "4k", "layers": 2, "gpus": 1, "seq_len": 4096}
    rows = [
        dense | {"step_s": 0.3, "tokens_per_s": 4096 / 0.3},
        dense | {"case": "4k-fp8", "fp8": True, "step_s": 0.2, "tokens_per_s": 4096 / 0.2},
        dense | {"engine": "bmtrain", "step_s": 0.6, "tokens_per_s": 4096 / 0.6},
    ]
    assert other_tables.fp8_table(rows).splitlines()[2:] == [
        "| 4k | 0.3 | 0.2 | 1.50 x | 20480 | - | - |"
    ]
    assert other_tables.fp8_table(rows[1:]) == ""
    assert other_tables.single_steps_table(rows).splitlines()[2:] == [
        "| 4k | bmtrain | 0.6 | - | 6827 | - |"
    ]
    chunked = rows[0] | {"chunk": 1024}
    assert other_tables.single_steps_table([*rows, chunked]) == ""
    longer = chunked | {"case": "1m", "seq_len": 1 << 20}
    assert "| 1m |" in other_tables.single_steps_table([*rows, longer])
