"""Training on GPUs: engines and sequence parallel sizes agree, memory is what it should be,
BMTrain's examples run.
"""

import dataclasses
import itertools
import json
import re
import subprocess

import pytest
import torch

from bmt_burst import kernels
from bmt_burst.loss import linear_cross_entropy_sum
from bmt_burst.offload import Offload
from models.blocks import Saving
from models.config import CPMConfig
from models.cpm import CPM
from tests.launcher import GPUS, RANKS, needs_ranks, torchrun
from tests.preparing import prepare
from tests.reference import relative_error
from tests.runs import read_records

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_ranks(1)]
needs_bmtrain = pytest.mark.skipif(
    not kernels.installed("bmtrain"), reason="needs the package bmtrain"
)

SHAPE = CPMConfig(
    320, 256, 512, 3, 4, 2, 64, scale_emb=12.0, scale_depth=1.4, dim_model_base=128, init_std=0.1
)
GIB = 2**30


def test_the_whole_logits_never_exist():
    """MiniCPM-2B's head over 128K tokens: less than 3 GiB for forward and backward, both gradients
    included. Whole logits would take 30 GiB.
    """
    tokens, vocabulary, size = 128 * 1024, 122_753, 2304
    hidden = torch.randn(1, tokens, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (
        torch.randn(vocabulary, size, device="cuda", dtype=torch.bfloat16) * 0.02
    ).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total, count = linear_cross_entropy_sum(hidden, weight, labels)
    dhidden, dweight = torch.autograd.grad(total / count, (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before < 3 * GIB
    rows = torch.arange(0, tokens, 512, device="cuda")
    logits = (hidden[0, rows] @ weight.T).double()
    expected = (
        logits.softmax(-1).scatter_add(1, labels[0, rows, None], -torch.ones_like(logits[:, :1]))
        / count
    ).to(torch.float64) @ weight.double()
    assert relative_error(dhidden[0, rows], expected) < 5e-3  # two roundings to bf16
    assert dweight.isfinite().all()


def saved_in(saving, tokens):
    """Gradients and peak memory of a model that saves so, beyond what was allocated before."""
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    config = CPMConfig(512, 1024, 2048, 6, 8, 8, 128)
    model = CPM(config, saving=saving, deterministic=True).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    peaks, positions = [], torch.arange(tokens.shape[1], device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss, count = model(tokens, positions, tokens)
        grads = torch.autograd.grad(loss / count, list(model.parameters()))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return grads, peaks


def test_offloading_and_recomputing_save_memory_and_change_no_bit():
    tokens = torch.randint(0, 512, (1, 16384), device="cuda")
    names = {
        "selective": Saving("selective"),
        "offloaded": Saving("selective", Offload()),
        "full": Saving("full"),
        "groups": Saving("full", Offload(), every=3),
    }
    results = {
        name: saved_in(saving, tokens) for name, saving in {"none": Saving(), **names}.items()
    }
    for name in names:
        assert all(a.equal(b) for a, b in zip(results[name][0], results["none"][0], strict=True)), (
            name
        )
        assert results[name][1][-1] < results["none"][1][-1], name
        assert results[name][1][1] == results[name][1][2], f"{name}: memory grows"
    assert results["offloaded"][1][-1] < results["selective"][1][-1]
    tiled, peaks = saved_in(Saving("full", Offload(), tile=2048), tokens)
    assert peaks[-1] < results["full"][1][-1]
    for a, b in zip(tiled, results["none"][0], strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "text.txt").write_text(
        "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(3000))
    )
    (folder / "model.json").write_text(json.dumps(SHAPE.to_dict()))
    prepare("--input", folder / "text.txt", "--output", folder / "data")
    return folder


def said_by(gpus, *command):
    done = torchrun(gpus, *command, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def curve(folder, gpus, name, **options):
    """Losses and gradient norms of a run."""
    defaults = {"model": folder / "model.json", "data": folder / "data/train", "seq_len": 1021}
    defaults |= {"batch_size": 4, "micro_batch_size": 1, "save_every": 0, "lr": 3e-3, "steps": 50}
    defaults |= {"output": folder / name}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in (defaults | options).items()]
    said_by(gpus, "train/pretrain.py", *flags)
    return [(r["loss"], r["grad_norm"]) for r in read_records(folder / name) if "loss" in r]


def check(got: list[tuple], expected: list[tuple], loss: float, norm: float) -> None:
    """Compare losses and gradient norms, up to these relative errors."""
    for mine, other in zip(got, expected, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=loss)
        assert mine[1] == pytest.approx(other[1], rel=norm)


SIZES = [n for n in (1, 2, 4) if n <= RANKS]


@needs_bmtrain
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_engines_and_sizes_agree(folder, dtype, bound):
    """fp32: rounding that Adam carries on; the first ten steps, in which it has not grown. bf16:
    all 50, at a rate at which training does not amplify rounding.
    """
    steps = 10 if dtype == "fp32" else 50
    options = {"dtype": dtype, "lr": 3e-4}
    expected = curve(folder, 1, f"{dtype}-torch-1", engine="torch", **options)[:steps]
    for engine, size in itertools.product(("torch", "bmtrain"), SIZES):
        if (engine, size) == ("torch", 1):
            continue
        name = f"{dtype}-{engine}-{size}-sp"
        got = curve(folder, size, name, engine=engine, sp_size=size, **options)[:steps]
        check(got, expected, bound, 10 * bound)


@needs_bmtrain
def test_packed_documents_agree(folder):
    """Documents that see only themselves, and a layer with a window: both engines, on one rank and
    on two.
    """
    lines = (json.dumps({"text": f"The number {i} and {'so on ' * (i % 97)}"}) for i in range(3000))
    (folder / "text.jsonl").write_text("\n".join(lines))
    prepare("--input", folder / "text.jsonl", "--output", folder / "documents")
    windowed = dataclasses.replace(SHAPE, window=200, window_pattern="wf")
    (folder / "windowed.json").write_text(json.dumps(windowed.to_dict()))
    options = {"model": folder / "windowed.json", "data": folder / "documents/train"}
    options |= {"documents": "mask", "dtype": "bf16", "lr": 3e-4, "steps": 30}
    expected = curve(folder, 1, "documents-1", engine="torch", **options)
    for engine in ("torch", "bmtrain") if RANKS > 1 else ():
        got = curve(folder, 2, f"documents-{engine}", engine=engine, sp_size=2, **options)
        check(got, expected, 1e-2, 1e-1)


@needs_ranks(2)
@needs_bmtrain
def test_bmtrain_resumes_on_another_number_of_ranks(folder):
    options = {"engine": "bmtrain", "dtype": "bf16", "sp_size": 2, "lr": 3e-4}
    options |= {"schedule": "linear", "warmup_steps": 1}
    whole = curve(folder, 2, "whole", **options)
    curve(folder, 2, "stopped", **options, save_every=20, keep_last=9)
    for step in (40, 50):
        subprocess.run(["rm", "-r", folder / f"stopped/step_{step:08d}"], check=True)
    resumed = curve(folder, 1, "stopped", **(options | {"sp_size": 1}), resume="auto")
    check(resumed[20:], whole[20:], 1e-2, 5e-2)


@needs_bmtrain
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_optimizer_may_be_offloaded(folder, dtype):
    ranks = min(RANKS, 2)
    options = {"engine": "bmtrain", "dtype": dtype, "sp_size": ranks, "steps": 20, "lr": 3e-4}
    (folder / "offload.json").write_text(json.dumps({"offload_optimizer": True}))
    on_gpu = curve(folder, ranks, f"{dtype}-on-gpu", **options)
    in_memory = curve(
        folder, ranks, f"{dtype}-in-memory", **options, config=folder / "offload.json"
    )
    check(in_memory, on_gpu, 1e-2, 1e-2)


@pytest.mark.alone
@needs_ranks(2)
@needs_bmtrain
def test_five_hundred_steps_beside_zeros_collectives(folder):
    """The ring's exchanges and BMTrain's all-gathers and reduce-scatters at once, without a hang or
    a bad number.
    """
    options = {"engine": "bmtrain", "dtype": "bf16", "sp_size": 2, "seq_len": 4093, "steps": 500}
    losses = [loss for loss, _ in curve(folder, GPUS - GPUS % 2 or 2, "soak", **options)]
    assert len(losses) == 500
    assert losses[-1] < 0.5 * losses[0]


@needs_ranks(2)
@needs_bmtrain
def test_a_few_lines_make_a_bmtrain_script_sequence_parallel():
    """One rank with a whole sequence, and two ranks with a half each."""
    said = [
        said_by(gpus, f"examples/bmtrain_{name}.py") for gpus, name in ((1, "before"), (2, "after"))
    ]
    pattern = r"step \d+: loss ([\d.]+), gradient norm ([\d.]+)"
    before, after = ([tuple(map(float, x)) for x in re.findall(pattern, text)] for text in said)
    assert len(before) == 20
    check(after, before, 1e-2, 5e-2)
