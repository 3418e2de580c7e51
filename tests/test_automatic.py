"""strategy="auto": which strategy it predicts to be the fastest, from whose constants, and what it
says.
"""

import dataclasses
import json
import logging
import os
from pathlib import Path

import pytest
import torch

from bench import masks
from bench.tables import read_rows
from bmt_burst import (
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    burst_attn_func,
    kernels,
    measuring,
    strategies,
)
from bmt_burst.calls.terms import compare_terms
from bmt_burst.measuring import Timed, check_device_bound, fit_host, fit_kernel, measure
from bmt_burst.ranks.simulation import simulate
from bmt_burst.strategies import choose, load, machine
from bmt_burst.strategies.machine import H200, HostWork, parse_machine
from bmt_burst.strategies.one_call import OneCallPlan
from bmt_burst.strategies.ring import Ring
from tests.helpers import ROOT, problem, run_ranks

CPU = dataclasses.replace(machine._H200, gpu="CPU", kernel="cpu")
HALF = {"dtype": torch.bfloat16, "partial": torch.bfloat16, "head_size": 128}


@pytest.fixture(autouse=True)
def own_machine(monkeypatch):
    monkeypatch.setattr(strategies, "_logged", set())
    machine._read_constants.cache_clear()
    yield
    machine.use_own_machine()
    machine._read_constants.cache_clear()


def taken(tokens: int, size: int, mask=None, known=CPU, layout=None, **sizes) -> str:
    mask = mask or Mask.causal(tokens * size)
    layout = layout or Layout.zigzag(mask.seq_len, size)
    sizes = {"heads": 32, "kv_heads": 8, **HALF, **sizes}
    return choose("auto", problem(mask, layout, **sizes), known).name


def test_short_blocks_get_one_call_and_long_ones_the_ring():
    assert taken(2048, 2) == "one-call"
    assert taken(2048, 2, batch=4) == "one-call"
    assert [taken(n << 10, 2) for n in (16, 64, 512)] == ["ring"] * 3
    assert taken(4096, 2, Mask.documents((0, 1500, 5000, 8192))) == "one-call"


def test_unequal_work_is_shared_by_heads():
    contiguous = Layout.contiguous(1 << 14, 2)
    assert taken(1 << 13, 2, layout=contiguous) == "ulysses"
    assert taken(1 << 13, 2, layout=contiguous, group_bytes=1 << 20) == "ring", "of memory"


def test_each_peer_of_an_exchange_takes_the_host_time():
    """Measured on 8 ranks: ring 3.4 ms, one-call 2.9, Ulysses 4.0."""
    assert taken(2048, 8) != "ulysses"


def biased_problems(size: int, layout: Layout | None = None):
    """CPM-Bee's bias at 64K tokens with FA4, and the same pairs without it."""
    scores, fa4 = masks.scores_of("bee", 1 << 16), kernels.load("fa4")
    layout = layout or masks.balanced("bee", 1 << 16, size)
    plain = problem(scores.mask, layout, heads=32, kv_heads=32, **HALF)
    plain = dataclasses.replace(plain, kernel=fa4)
    return dataclasses.replace(plain, scores=scores, biased_kernel=fa4), plain


def test_a_bias_counts_in_predictions(monkeypatch):
    """The backward of a rank whose pairs mostly have their own rows takes longer. Ulysses shares
    these pairs equally, a layout of equal numbers of pairs does not.
    """
    known = machine._H200
    biased, plain = biased_problems(8)
    assert load("ring").predict(biased, known) > 3 * load("ring").predict(plain, known)
    assert choose("auto", biased, known).name == "ulysses"
    for changes in ({"biased_kernel": kernels.load("triton")}, {"kernel": kernels.load("triton")}):
        other = dataclasses.replace(biased, **changes)
        assert choose("auto", other, known).name == "ring", "nothing is known about its kernel"
    monkeypatch.setattr(strategies, "_MOST_SLICES", 100)
    assert choose("auto", biased, known).name == "ring", "this takes long to predict"


def test_kernels_whose_cost_of_a_bias_is_not_known_get_the_first_strategy():
    biased, _ = biased_problems(8)
    triton = kernels.load("triton")
    biased = dataclasses.replace(biased, kernel=triton, biased_kernel=triton)
    known = dataclasses.replace(machine._H200, kernel="triton")
    assert choose("auto", biased, known).name == "ring"


def test_a_bias_that_no_pair_has_is_predicted(monkeypatch):
    """Where no token sees another, scores of long groups have no terms."""
    kernel = kernels.load("reference")
    monkeypatch.setitem(machine.BIASED_TIMES, kernel.name, machine.BIASED_TIMES["fa4"])
    machine.use_machine(dataclasses.replace(CPU, kernel=kernel.name))
    group = torch.arange(2).repeat_interleave(1024).int()
    rows, distances = torch.tensor([-1]).int(), torch.tensor([0]).int()
    scores = Scores(Mask(2048, ()), group, 0 * group, 0 * group, rows, distances, 1)
    assert scores.terms == ()

    def work(ring):
        q = torch.ones(1, 1024, 2, 8)
        options = {"scores": scores, "bias": torch.zeros(2, 2), "flash": kernel.name}
        return burst_attn_func(q, q, q, process_group=ring, **options)

    assert all(not out.any() for out in simulate(2, work))


def test_a_bias_needs_a_clearer_advantage(monkeypatch):
    """Predictions of it are less exact."""
    biased, plain = biased_problems(2)
    known = machine._H200
    monkeypatch.setattr(Ring, "predict", lambda *_: 10.0)
    for seconds, names in ((9.0, ("ring", "ulysses")), (8.0, ("ulysses", "ulysses"))):
        monkeypatch.setattr(type(load("ulysses")), "predict", lambda *_, time=seconds: time)
        found = [choose("auto", call, known).name for call in (biased, plain)]
        assert tuple(found) == names


def test_the_predicted_time_of_a_bias_is_near_what_was_measured():
    """One H200 with all tokens: 114.8 ms. `BIASED_TIMES` states the error."""
    biased, _ = biased_problems(1, Layout.contiguous(1 << 16, 1))
    assert load("ring").predict(biased, machine._H200) == pytest.approx(0.1148, rel=0.13)


def test_slow_links_and_slow_hosts_count():
    slow = dataclasses.replace(CPU, rates=dataclasses.replace(H200, bytes=1e9))
    assert taken(2048, 2, known=slow) == "ring"
    busy = dataclasses.replace(CPU, call_seconds=0.1)
    assert taken(1 << 15, 2, known=busy, group_bytes=1 << 40) == "one-call"


def test_the_first_strategy_is_taken_where_nothing_is_predicted():
    assert taken(2048, 2, known=None) == "ring"
    assert taken(2048, 2, known=dataclasses.replace(CPU, kernel="fa4")) == "ring"
    assert choose("ulysses", problem(Mask.causal(64), Layout.zigzag(64, 2)), CPU).name == "ulysses"


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "is_predicted"),
    [(1024, (0, 500, 1024), True), (2048, (0, 2048), True), (2048, (0, 500, 2048), False)],
)
def test_layouts_that_take_long_to_plan_get_the_first_strategy(
    tokens, cu_seqlens, is_predicted, monkeypatch
):
    """Documents of striped layouts. Without documents the stripes are one band."""
    predicted = []
    monkeypatch.setattr(Ring, "predict", lambda *_: predicted.append(None))
    layout = Layout.striped(tokens, 2)
    call = problem(Mask.documents(cu_seqlens), layout, heads=32, kv_heads=8, **HALF)
    found = choose("auto", call, CPU).name
    assert bool(predicted) == is_predicted
    assert is_predicted or found == "ring"


def test_too_large_exchanges_of_one_call_are_not_planned(monkeypatch):
    monkeypatch.setattr(OneCallPlan, "gathered", None)
    mask, layout = Mask.causal(4096), Layout.zigzag(4096, 4)
    call = problem(mask, layout, heads=32, kv_heads=8, group_bytes=1000, **HALF)
    assert load("one-call").predict(call, CPU) is None


@pytest.mark.parametrize("inner", [1, 2])
def test_double_groups_never_get_one_call(inner):
    mask, layout = Mask.causal(4096), Layout.zigzag(4096, 4)
    call = problem(mask, layout, inner, heads=32, kv_heads=8, **HALF)
    assert choose("auto", call, CPU).name in ("ring", "usp")


def test_each_choice_is_said_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, "bmt_burst")
    for _ in range(2):
        taken(2048, 2)
        taken(1 << 16, 2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "'one-call'" in said[0]
    assert "ring 2.31 ms, ulysses 2.40 ms, one-call 2.03 ms are predicted" in said[0]


def test_choices_are_near_the_best_that_was_measured():
    """Peers were imagined: nothing was sent, and "auto" got constants with free links. Where the
    host limits, the same strategy by its name and by "auto" differs by up to 6 %.
    """
    known = dataclasses.replace(CPU, rates=dataclasses.replace(H200, bytes=1e18))
    rows = read_rows([Path(ROOT) / "bench/results/one-rank-1-nvidia-h200-auto.jsonl"])
    shape = ("mask", "seq_len", "gpus", "batch", "heads", "kv_heads", "head_dim")
    measured: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["impl"] in ("bmt_burst", "ring", "one-call", "ulysses"):
            times = measured.setdefault(tuple(row[x] for x in shape), {})
            times[row["impl"]] = row["fwd_bwd_ms"]
    assert len(measured) >= 11
    for (mask, tokens, gpus, *numbers), times in measured.items():
        sizes = dict(zip(("batch", "heads", "kv_heads", "head_size"), numbers, strict=True))
        layout = masks.balanced(mask, tokens, gpus)
        call = problem(masks.mask_of(mask, tokens), layout, **(HALF | sizes))
        chosen = choose("auto", call, known).name
        automatic, best = times.pop("bmt_burst"), min(times.values())
        assert automatic <= 1.02 * best, (mask, tokens, gpus, numbers)
        assert times[chosen] <= 1.07 * best, (mask, tokens, gpus, numbers, chosen)


def test_all_ranks_use_the_constants_of_rank_0():
    """Rank 1 has no constants, and calls with short blocks still get one strategy."""
    terms = {"doing": "call 1", "tokens": 4}
    lines = [json.dumps({**terms, "machine": m}).encode() for m in (CPU.line, None)]
    assert compare_terms(lines).machine == CPU
    assert compare_terms(lines[::-1]).machine is None


def attend(ring):
    machine.use_machine(CPU)
    q = torch.ones(1, 8, 2, 16, requires_grad=True)
    out = burst_attn_func(q, q, q, causal=True, process_group=ring)
    out.sum().backward()
    return out.detach()


def test_attention_takes_the_predicted_strategy(caplog):
    caplog.set_level(logging.INFO, "bmt_burst")
    for out in simulate(2, attend):
        assert torch.allclose(out, torch.ones_like(out))
    assert any("took 'one-call'" in record.getMessage() for record in caplog.records)


def test_a_file_of_constants_is_read_or_refused_by_name(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    assert machine.machine_of(cpu) is None
    path = tmp_path / "machine.json"
    path.write_text(CPU.line)
    monkeypatch.setenv(machine.VARIABLE, str(path))
    machine._read_constants.cache_clear()
    assert machine.machine_of(cpu) == CPU
    path.write_text("{}")
    machine._read_constants.cache_clear()
    with pytest.raises(ValueError, match=r"expected BMT_BURST_MACHINE=.*machine\.json to have"):
        machine.machine_of(cpu)
    q = torch.ones(1, 8, 2, 16)
    with pytest.raises(ValueError, match="BMT_BURST_MACHINE"):
        simulate(2, lambda ring: burst_attn_func(q, q, q, process_group=ring))


def test_measured_constants_of_another_gpu_are_refused(tmp_path, monkeypatch):
    """As in a home folder that was copied from another machine, with the file renamed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    path = machine.measured_file("NVIDIA H200")
    path.parent.mkdir()
    path.write_text(dataclasses.replace(CPU, gpu="NVIDIA H200").line)
    gpu = torch.device("cuda", 0)
    assert machine.machine_of(gpu).kernel == "cpu"
    path.write_text(CPU.line)
    machine._read_constants.cache_clear()
    with pytest.raises(ValueError, match="to have the constants of NVIDIA H200, got CPU's"):
        machine.machine_of(gpu)


def test_a_pipe_is_refused_instead_of_read(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(machine.VARIABLE, str(pipe))
    with pytest.raises(ValueError, match=r"expected BMT_BURST_MACHINE=.*pipe to be a file"):
        machine.machine_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"call_seconds": -1.0}, "call_seconds of a file to be positive, got -1.0"),
        ({"call_seconds": "fast"}, "call_seconds of a file to be a number, got 'fast'"),
        ({"gpu": 3}, "gpu and kernel of a file to be names"),
        ({"speed": 3}, "speed"),
        ({"rates": None}, "rates"),
        ({"rates": {"operations": 1e12}}, r"rates lack \['bytes', 'host_bytes'\]"),
        ({"step_seconds": 10**400}, "step_seconds of a file to be positive, got inf"),
    ],
)
def test_wrong_constants_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        parse_machine(json.dumps(json.loads(CPU.line) | change), "a file")


def test_nested_constants_are_refused():
    with pytest.raises(ValueError, match="expected a file to have"):
        parse_machine("[" * 100_000, "a file")


def test_constants_survive_json():
    assert parse_machine(CPU.line, "a file") == CPU


def test_constants_are_found_from_times():
    work = [HostWork(4, 3, 10), HostWork(2, 3, 16), HostWork(2, 6, 33)]
    found = fit_host(CPU.message_seconds, [CPU.host_seconds(w) for w in work], work)
    assert found == pytest.approx({name: getattr(CPU, name) for name in found})
    sizes, heads = (4096, 16384), 16
    operations = [4 * heads * 128 * n * ((n + 1) / 2 + 500) for n in sizes]
    assert fit_kernel(sizes, [x / 6e14 for x in operations], heads) == pytest.approx((6e14, 500))


def test_times_that_contradict_each_other_are_refused():
    """As where something else ran for a while."""
    work = [HostWork(4, 3), HostWork(2, 3), HostWork(2, 6)]
    with pytest.raises(RuntimeError, match=r"expected a kernel call to take time, got -1.0e-03 s"):
        fit_host(1e-6, [2e-3, 3e-3, 4e-3], work)
    with pytest.raises(RuntimeError, match="expected 48 more tokens to take time"):
        fit_kernel((16, 64), (1e-3, 3e-3), 1)


def test_a_host_that_is_slower_than_its_gpu_says_nothing_of_the_gpu():
    """Two H200 once had 1.5e15 operations a second: the shorter call took the host longer."""
    check_device_bound(Timed(1e-3, 0.7e-3), "a forward")
    with pytest.raises(RuntimeError, match=r"a forward to take the GPU longer.* got 1\.00 ms"):
        check_device_bound(Timed(1e-3, 0.9e-3), "a forward")


def measured_here(rank):
    measuring._ROUNDS = measuring._CALLS = 2
    try:
        sp = SequenceParallel(rank, 2, process_group=None)
        found = measure(sp, torch.device("cpu"), 512, heads=1)
        return found and found.line
    except RuntimeError as error:
        return str(error)


@pytest.mark.ranks
def test_constants_are_measured_or_refused():
    line, other = run_ranks(2, measured_here)
    assert other is None
    if "measure again while the machine does nothing else" not in line:
        found = parse_machine(line, "rank 0")
        assert (found.gpu, found.kernel) == ("CPU", "cpu")
        assert 1e4 < found.rates.bytes < 1e12
        assert 1e6 < found.rates.operations < 1e15
