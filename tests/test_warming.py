"""Kernels that are compiled before the first step: which, and what the log says of them."""

import dataclasses
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bmt_burst import InfLLMV2, SequenceParallel, ahead
from bmt_burst.blocks import far
from bmt_burst.calls import softmax
from bmt_burst.kernels.fa4 import Fa4Kernel
from bmt_burst.kernels.torch_ops import CpuKernel
from bmt_burst.sparse import torch_choice
from models.config import PRESETS, CPMConfig
from tests.launcher import ROOT
from tests.sparse import RELEASED
from train import pretrain
from train.planning import warming
from train.planning.warming import Rehearsal, take_steps
from train.settings.config import TrainConfig

TYPICAL = Rehearsal(
    model=CPMConfig(16, 16, 16, 1, num_heads=2, num_kv_heads=1, head_dim=8),
    attention={"flash": "fa4", "deterministic": False, "strategy": "auto"},
    dtype=torch.float32,
    layout="auto",
    seq_len=1 << 16,
    rows=1,
    size=2,
    inner=2,
    documents=True,
    chunks=1,
)
RING, USP, ULYSSES = (TYPICAL.attention | {"strategy": x} for x in ("ring", "usp", "ulysses"))
OF_MODEL = {field.name for field in dataclasses.fields(CPMConfig)}
SHORT_BLOCKS = InfLLMV2(**RELEASED | {"window_size": 512, "topk": 4, "dense_len": 1536})


def changed(**changes):
    of_model = {name: changes.pop(name) for name in OF_MODEL & {*changes}}
    model = dataclasses.replace(TYPICAL.model, **of_model)
    return dataclasses.replace(TYPICAL, model=model, **changes)


def fake_kernel(setattr):
    """Let FlashAttention-4 accept tensors of a CPU, which it does not compute."""
    setattr(Fa4Kernel, "refuses", lambda *_: None)
    setattr(Fa4Kernel, "broken", lambda *_: None)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    fake_kernel(monkeypatch.setattr)
    monkeypatch.setattr(ahead, "_TOKENS", 2048)


def note(run):
    """The kernels of a rehearsal, and what compiles them."""
    found = {}
    torch.set_num_threads(1)
    for arguments in run.arguments():
        with ahead.note_kernels(run.seq_len) as noted:
            take_steps(*arguments)
        found |= noted
    return found


def bands(run):
    """The rehearsed forwards: the edges of the band, whether packed, and whether many."""
    edges = {(0, 0): "full", (0, 1): "causal", (1, 0): "left", (1, 1): "both"}
    return {
        f"{'packed' * packed or 'dense'} {edges[left, right]}{' many' * many}"
        for way, _, (left, right, _, packed, many) in note(run)
        if way == "forward"
    }


def test_the_kernels_of_typical_runs():
    alone = {"size": 1, "inner": 1, "documents": False}
    assert bands(changed(**alone)) == {"dense causal"}
    ring = {"dense causal", "dense full"}
    assert bands(changed(documents=False)) == ring | {"packed causal"}, "of one-call"
    assert bands(TYPICAL) == ring | {"packed causal", "packed full", "packed causal many"}
    windowed = bands(changed(window=1024))
    assert {"packed both", "dense left"} <= windowed


def test_each_variant_is_compiled_by_such_a_call(monkeypatch):
    jobs = note(changed(num_heads=4, num_kv_heads=4, attention=ULYSSES))
    jobs |= note(changed(window=700, rows=2))
    assert {way for way, *_ in jobs} == {"forward", "backward", "by delta"}
    computed = set()

    def forward(self, q, k, v, call, spec):
        add("forward", self, q, k, v, call)

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        assert (out is None) != (delta is None)
        assert lse.shape == (len(q), q.shape[2], q.shape[1])
        add("by delta" if out is None else "backward", self, q, k, v, call)

    def add(way, kernel, q, k, v, call):
        assert (q.shape[1], k.shape[1]) == (call.q_tokens, call.kv_tokens)
        assert k.shape == v.shape
        computed.add((way, q.shape[2] // k.shape[2], kernel.variant(call, len(q))))

    monkeypatch.setattr(Fa4Kernel, "forward", forward)
    monkeypatch.setattr(Fa4Kernel, "backward", backward)
    for job in jobs.values():
        job()
    assert computed == jobs.keys()


def test_kernels_of_which_nothing_is_kept_compute_nothing(monkeypatch):
    """cuDNN would prepare each length of a document, which takes longer than the first step."""

    def compute(*_):
        raise AssertionError("a kernel was launched")

    for name in ("block_forward", "block_backward"):
        monkeypatch.setattr(CpuKernel, name, compute)
    assert note(changed(attention=RING | {"flash": "cpu"})) == {}


def random_ends(chance, tokens):
    mean, ends = tokens / chance.choice((1, 2, 4, 10, 50)), [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + 1 + int(chance.expovariate(1 / mean))))
    return ends


def skip_far(monkeypatch):
    """Leave out the choice of blocks and the far ones, for which CPUs take long."""

    def choose(q, choosers, keys, sparse, scale):
        count = len(choosers.tokens), keys.scored.shape[1], sparse.most_blocks
        return torch.arange(sparse.most_blocks, dtype=torch.int32).expand(count).clone()

    monkeypatch.setattr(torch_choice, "choose_by_score", choose)
    monkeypatch.setattr(far, "add_far_outputs", lambda *_: None)
    monkeypatch.setattr(far, "add_far_gradients", lambda *_: None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": 3, "inner": 3},
        {"size": 4, "inner": 2},
        {"size": 4, "inner": 2, "num_heads": 4, "num_kv_heads": 2, "attention": USP},
        {"window": 700, "window_pattern": "wf", "num_layers": 2},
        {"sparse": SHORT_BLOCKS},
        {"rows": 2, "seq_len": 1 << 12},
        {"chunks": 2, "window": 700, "rows": 2, "seq_len": 1 << 12, "attention": RING},
        {"chunks": 5, "sparse": SHORT_BLOCKS, "attention": RING},
        {"chunks": 4, "size": 4, "inner": 2, "documents": False},
        {"chunks": 3, "seq_len": 50, "attention": RING},
        {"chunks": 5, "num_heads": 8, "attention": RING},
        {"documents": False, "rows": 2},
    ],
    ids=str,
)
def test_masks_of_a_run_need_no_other_kernels(changes, monkeypatch):
    """Nor do any ranks, with any strategy that "auto" takes. So no later step compiles."""
    skip_far(monkeypatch)
    run, chance = changed(**{"seq_len": 1 << 14} | changes), random.Random(1)
    known = note(run).keys()
    tokens = run.seq_len - run.seq_len % (run.size * run.chunks)
    examples = [random_ends(chance, tokens) if run.documents else [0, tokens] for _ in range(4)]
    monkeypatch.setattr(warming, "_CHUNKS", run.chunks)
    monkeypatch.setattr(Rehearsal, "examples", lambda self: examples)
    for rank in chance.sample(range(run.size), 2):
        with ahead.note_kernels(run.seq_len) as noted:
            take_steps(run, rank, None)
        assert noted.keys() <= known
        # the next one as on GPUs, where "auto" may also take one-call
        monkeypatch.setattr(softmax, "_find_strategy", lambda name, _: name)


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
    assert {*ahead.KERNELS, warming.UPDATES} == found - inner


class FakeData(SimpleNamespace):
    """Data that is not kept apart by documents."""

    documents = False


CPU = torch.device("cpu")
WATCHDOG = SimpleNamespace(alive=lambda doing: None, timeout=1800.0)


def inputs_of(model):
    return SimpleNamespace(model=PRESETS[model], training=FakeData())


@pytest.mark.parametrize(
    ("name", "layers"), [("minicpm-sala", 2), ("qwen3-0.6b", 1), ("minicpm4-8b", 1)]
)
def test_a_model_with_a_layer_of_each_kind_is_rehearsed(name, layers):
    config, inputs = TrainConfig(model=name, seq_len=500, chunk=200), inputs_of(name)
    run = warming.find_facts(config, inputs, SequenceParallel(), 1)
    assert (run.dtype, run.chunks, run.documents) == (torch.float32, 3, False)
    small, model = run.small, PRESETS[name]
    assert {*small.mixer_of_layers} == {*model.mixer_of_layers} and small.num_layers == layers
    for fact in ("hidden_size", "head_dim", "num_kv_heads", "qk_norm", "attention_gate"):
        assert getattr(small, fact) == getattr(model, fact)


def test_each_window_and_rotary_layer_is_rehearsed_once():
    patterns = {"window_pattern": "wwwf", "rotary_pattern": "rrrn"}
    small = changed(num_layers=8, window=9, **patterns).small
    assert (small.windows, small.rotary_layers) == ((9, None), (True, False))


def test_the_log_says_what_was_compiled_and_a_run_goes_on_without(monkeypatch):
    def start(*seconds, error=None):
        def compile_kernels(*_):
            for x in seconds:
                yield ahead.Progress(14, x, ("/triton", "/fa4"))
            if error:
                raise error

        monkeypatch.setattr(ahead, "compile_kernels", compile_kernels)
        given = TrainConfig(), inputs_of("cpm-tiny"), SequenceParallel(), 1
        return warming.warm(*given, torch.device("cuda", 0), WATCHDOG)

    assert start(0.5, 1.25) == ["compiled 14 kernels in 1.2 s; kept in /triton and /fa4"]
    assert start(0.0) == ["found 14 kernels in /triton and /fa4"]
    later = "kernels will be compiled in the steps that first need them: "
    assert start(0.5, error=ValueError("no GPU")) == [f"{later}no GPU"]


@pytest.mark.parametrize("model", ["cpm-tiny", "cpm-ant-tiny", "no-model"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cpu"])
def test_a_rank_of_each_host_starts_a_compiler_before_it_joins(device, model, monkeypatch):
    """Unless its model compiles nothing, or cannot be read."""
    starts = (device, model) == ("cuda:0", "cpm-tiny")
    events = []

    class Compiler(nullcontext):
        def __init__(self, *modules):
            super().__init__("compiler")
            events.append(modules)

    def make_trainer(*given):
        monkeypatch.setattr(ahead, "compile_kernels", lambda *given: events.append(given[-1]) or ())
        if model in PRESETS:
            run = TrainConfig(), inputs_of(model), SequenceParallel(), 1
            given[-1](*run, given[1], WATCHDOG)
        raise FileNotFoundError("no data")

    monkeypatch.setattr(ahead, "Compiler", Compiler)
    monkeypatch.setattr(pretrain, "choose_device", lambda *_: torch.device(device))
    monkeypatch.setattr(pretrain, "init_distributed", lambda *_: events.append("joined"))
    monkeypatch.setattr(pretrain, "Trainer", make_trainer)
    with pytest.raises(FileNotFoundError, match="no data"):
        pretrain._run_rank([], TrainConfig(model=model), None, None, WATCHDOG)
    assert [x for x in events if x != "joined"] == [warming.MODULES, "compiler"] * starts
    assert events.index("joined") == starts


def test_nothing_is_compiled_on_cpus():
    given = TrainConfig(), inputs_of("cpm-tiny"), SequenceParallel(), 1
    assert warming.warm(*given, CPU, WATCHDOG) == []
