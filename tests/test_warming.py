"""Kernels that are compiled before the first step: which, and what the log says of them."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bmt_burst import InfLLMV2, SequenceParallel
from bmt_burst.kernels import fa4
from bmt_burst.kernels.fa4 import Fa4Kernel
from models.config import PRESETS
from tests.launcher import ROOT
from tests.sparse import RELEASED
from tests.test_model import SMALL
from train.planning import rehearsal, warming
from train.planning.rehearsal import Recorder, Rehearsal, make_calls, rehearse
from train.settings.config import TrainConfig

CPU = torch.device("cpu")
TYPICAL = Rehearsal(
    norms=[16],
    gated=False,
    lightning=None,
    heads=2,
    kv_heads=1,
    head_size=8,
    dtype="bfloat16",
    flash="fa4",
    deterministic=False,
    strategy="auto",
    layout="auto",
    seq_len=1 << 16,
    rows=1,
    sp_size=2,
    inner_size=2,
    windows=[None],
    sparse=None,
    documents=True,
    many_documents=False,
    chunks=1,
    engine="torch",
)
SHORT_BLOCKS = InfLLMV2(**RELEASED | {"window_size": 512, "topk": 4, "dense_len": 1536})


def changed(**changes):
    return dataclasses.replace(TYPICAL, **changes)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rehearsal, "_TOKENS", 2048)


def rehearsed(facts, device=CPU):
    """The variants of the calls of a rehearsal, without far blocks, for which CPUs take long."""
    kernel = Recorder(Fa4Kernel())
    for plan, problem, rank in facts.plans(kernel):
        make_calls(getattr(plan, "near", plan), problem, rank, device)
    return kernel.jobs.keys()


def bands(facts):
    """The rehearsed forwards: the edges of the band, whether packed, and whether many."""
    edges = {(0, 0): "full", (0, 1): "causal", (1, 0): "left", (1, 1): "both"}
    return {
        f"{'packed' * packed or 'dense'} {edges[left, right]}{' many' * many}"
        for way, _, (left, right, _, packed, many) in rehearsed(facts)
        if way == "_call_forward"
    }


def test_the_kernels_of_typical_runs():
    alone = {"sp_size": 1, "inner_size": 1, "documents": False}
    assert bands(changed(**alone)) == {"dense causal"}
    assert bands(changed(documents=False)) == {"dense causal", "dense full"}
    documents = {"dense causal", "dense full", "packed causal", "packed full"}
    assert bands(TYPICAL) == documents
    assert bands(changed(many_documents=True)) == documents | {"packed causal many"}
    windowed = bands(changed(windows=[1024]))
    assert {"packed both", "dense left"} <= windowed


class Noting(Fa4Kernel):
    """FlashAttention-4, which notes the calls that it gets."""

    def __init__(self):
        self.noted = set()

    def forward(self, q, k, v, call, spec):
        self.note("_call_forward", q, k, v, call)

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        assert (out is None) != (delta is None)
        assert lse.shape == (len(q), q.shape[2], q.shape[1])
        self.note("_call_backward_by_delta" if out is None else "_call_backward", q, k, v, call)

    def note(self, way, q, k, v, call):
        assert (q.shape[1], k.shape[1]) == (call.q_tokens, call.kv_tokens)
        assert k.shape == v.shape
        self.noted.add((way, q.shape[2] // k.shape[2], self.variant(call, len(q))))


def test_each_variant_is_compiled_by_such_a_call():
    kernel = Recorder(Noting())
    rehearse(changed(heads=4, kv_heads=4, strategy="ulysses"), kernel, CPU)
    rehearse(changed(windows=[700], rows=2), kernel, CPU)
    assert {way for way, *_ in kernel.jobs} > {"_call_backward", "_call_backward_by_delta"}
    for job in kernel.jobs.values():
        job()
    assert kernel.kernel.noted == kernel.jobs.keys()


def random_ends(chance, tokens):
    mean, ends = tokens / chance.choice((1, 2, 4, 10, 50)), [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + 1 + int(chance.expovariate(1 / mean))))
    return ends


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sp_size": 3, "inner_size": 3},
        {"sp_size": 4, "inner_size": 2},
        {"strategy": "usp", "sp_size": 4, "inner_size": 2, "heads": 4, "kv_heads": 2},
        {"windows": [None, 700]},
        {"sparse": SHORT_BLOCKS.to_dict()},
        {"rows": 2, "seq_len": 1 << 12},
        {"chunks": 7},
        {"chunks": 2, "windows": [700], "rows": 2, "seq_len": 1 << 12},
        {"chunks": 5, "sparse": SHORT_BLOCKS.to_dict()},
        {"chunks": 4, "sp_size": 4, "inner_size": 2, "documents": False},
        {"chunks": 3, "seq_len": 50},
        {"chunks": 7, "heads": 8},
    ],
    ids=str,
)
def test_masks_of_a_run_need_no_other_kernels(changes, monkeypatch):
    """Nor do any ranks. So no later step compiles."""
    facts, chance = changed(**{"seq_len": 1 << 14} | changes), random.Random(1)
    known = rehearsed(facts)
    examples = [random_ends(chance, facts.seq_len) for _ in range(50 // len(facts.windows))]
    monkeypatch.setattr(Rehearsal, "tokens", facts.seq_len)
    monkeypatch.setattr(rehearsal, "_CHUNKS", facts.chunks)
    monkeypatch.setattr(Rehearsal, "rank_sample", lambda self: [chance.randrange(facts.sp_size)])
    monkeypatch.setattr(Rehearsal, "examples", lambda self: iter(examples))
    assert rehearsed(facts) <= known


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": 32, "seq_len": 1 << 20, "sparse": InfLLMV2().to_dict()},
        {"sp_size": 8, "inner_size": 8, "sparse": InfLLMV2().to_dict()},
        {"sp_size": 8, "inner_size": 8, "windows": [None, 4096]},
    ],
    ids=str,
)
def test_long_sequences_need_no_other_kernels(changes, monkeypatch):
    """Their ranks have ranges that are longer than a window."""
    facts = changed(**{"documents": False, "seq_len": 1 << 19} | changes)
    meta = torch.device("meta")
    known = rehearsed(facts, meta)
    monkeypatch.setattr(Rehearsal, "tokens", facts.seq_len)
    monkeypatch.setattr(rehearsal, "_CHUNKS", facts.chunks)
    assert rehearsed(facts, meta) <= known


def test_triton_kernels_are_found_and_compiled_without_a_launch(tmp_path):
    """In another process, since those of this one are interpreted."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.warm_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    passes = {"_normalize", "_norm_gradients", "_gate", "_gate_gradients", "_rotate_pairs"}
    others = {"_merge_outputs", "_sum_gradients", "_fill_lse_delta", "_compute_losses", "_update"}
    lightning = {"sum_pieces", "chain_states", "attend", "attend_back"}
    assert set(done.stdout.split()) == passes | others | lightning
    assert list(tmp_path.rglob("_merge_outputs.cubin"))


def test_the_keys_of_all_kernels_are_settled():
    """A module that is left out would have its kernels compiled twice. Calls with biases are not
    rehearsed.
    """
    files = [f for top in ("bmt_burst", "models", "train") for f in (ROOT / top).rglob("*.py")]
    found = {f.relative_to(ROOT) for f in files if "@triton.jit" in f.read_text()}
    found = {".".join(f.with_suffix("").parts) for f in found if "bias" not in f.parts}
    inner = {"bmt_burst.kernels.triton_memory"}  # functions of kernels
    assert set(rehearsal.KERNELS) == found - inner


def test_a_process_ends_with_its_run():
    """Here the run has ended before."""
    command = [sys.executable, "-m", "train.planning.rehearsal", "{}", "0", "1", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "the process that started this one is gone\n")


class FakeData(SimpleNamespace):
    """Data that is not kept apart by documents."""

    documents = False


def test_the_passes_of_a_model_are_rehearsed():
    def facts_of(model):
        config = TrainConfig(model=model, flash="fa4")
        found = warming.make_rehearsal(config, PRESETS[model], FakeData(), SequenceParallel(), 1)
        return found.norms, found.gated, found.lightning

    assert facts_of("minicpm-sala") == ([4096, 128], True, "auto")
    assert facts_of("sala-tiny") == ([128, 32], True, "auto")
    assert facts_of("qwen3-0.6b") == ([1024, 128], False, None)
    assert facts_of("minicpm4-8b") == ([4096], False, None)


def start(monkeypatch, folder, code):
    """Start to compile as on a GPU, with processes that run `code`."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 0))
    monkeypatch.setattr(Rehearsal, "pick_kernel", lambda *_: Fa4Kernel())
    monkeypatch.setattr(fa4, "cache_folder", lambda: folder / "fa4")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    popen = subprocess.Popen

    def run(command, **options):
        facts = json.loads(command[4])
        assert (facts["dtype"], facts["chunks"]) == ("float32", 3)
        assert command[1:4] == ["-P", "-m", "train.planning.rehearsal"]
        assert int(command[5]) < int(command[6]) <= 2, "memory has room for two"
        assert int(command[7]) == os.getpid()
        return popen([sys.executable, "-c", code], **options)

    inputs, gpu = SimpleNamespace(model=SMALL, training=FakeData()), torch.device("cuda", 0)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", run)
        config = TrainConfig(seq_len=500, chunk=200)
        return warming.start_warming(config, inputs, SequenceParallel(), 1, gpu)


WATCHDOG = SimpleNamespace(alive=lambda doing: None, timeout=1800.0)


def test_the_log_says_what_was_compiled_and_what_was_found(monkeypatch, tmp_path):
    [line] = start(monkeypatch, tmp_path, "print('a warning'); print(14)").finish(WATCHDOG)
    assert line.startswith("compiled 14 kernels in ")
    assert line.endswith(f"; kept in {tmp_path}/triton and {tmp_path}/fa4")
    found = start(monkeypatch, tmp_path, "raise SystemExit('not again')")
    assert not found.processes, "nothing is left to compile"
    places = f"{tmp_path}/triton and {tmp_path}/fa4"
    assert found.finish(WATCHDOG) == [f"found 14 compiled kernels in {places}"]
    [mark] = (tmp_path / "fa4").iterdir()
    mark.unlink()  # as where the kernels were removed
    assert start(monkeypatch, tmp_path, "print(14)").processes


def test_a_run_goes_on_without_compiled_kernels(monkeypatch, tmp_path):
    later = "kernels will be compiled in the steps that first need them: "
    failed = start(monkeypatch, tmp_path, "raise SystemExit('out of memory')")
    assert failed.finish(WATCHDOG) == [f"{later}out of memory"]
    monkeypatch.setattr(warming, "_MOST_SECONDS", 0.1)
    slow = start(monkeypatch, tmp_path, "import time; time.sleep(60)")
    assert slow.finish(WATCHDOG) == [f"{later}exit code -9"]
    full = start(monkeypatch, tmp_path, "print(14)")
    full.marks = [tmp_path / "missing" / "mark"]
    monkeypatch.setattr(warming, "_MOST_SECONDS", 60)
    [line] = full.finish(WATCHDOG)
    assert line.startswith(f"{later}[Errno 2]")
    file = tmp_path / "file"
    file.touch()
    [line] = start(monkeypatch, file, "print(14)").finish(WATCHDOG)
    assert line.startswith(later)
    assert f"Not a directory: '{file}/triton'" in line


def test_nothing_is_compiled_on_cpus():
    inputs = SimpleNamespace(model=SMALL, training=FakeData())
    started = warming.start_warming(TrainConfig(), inputs, SequenceParallel(), 1, CPU)
    assert started.finish(WATCHDOG) == []
