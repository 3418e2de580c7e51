"""Models of ModelCenter over BMTrain's own Python code, on CPUs: see model_center_rank.py and
fake_cuda.py; and on GPUs, where two ranks that share sequences equal one GPU.
"""

import functools
import json
import os
import re
from collections.abc import Callable

import pytest
import torch

from bmt_burst import kernels
from tests import model_center_rank
from tests.launcher import GPUS, ROOT, needs_ranks, run_script, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.installed("bmtrain"), reason="needs the package bmtrain"),
    pytest.mark.skipif(
        not kernels.installed("model_center"), reason="needs the package model-center"
    ),
]
on_cpus = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with GPUs the last tests run what this does"
)


def on_gpus(test):
    """Mark a test of two ranks on GPUs, with BMTrain as it is."""
    return pytest.mark.gpu(pytest.mark.ranks(needs_ranks(2)(test)))


FEW = ["lengths", "documents of rows", "context", "segments"]
# Models that differ from another one in some calls only.
SOME = dict.fromkeys(("GPTj", "GPT2", "OPT", "Roberta"), ("documents of rows",))
SOME |= {"Bert": ("padding", "documents of rows"), "CPM1": ("lengths", "context of spans")}
# by the number of ranks: which are compared, in which calls; None: in all that are meant for it
MODELS = {1: {"CPM1": FEW, "CPM3": FEW}, 2: dict.fromkeys(model_center_rank.CONFIGS) | SOME}
ROUNDING = 1e-5, 1e-5  # of fp32, through two layers
RUNS = {  # what ranks do, in one process each
    1: [["equality", "float32", MODELS[1], *ROUNDING], ["example", "before"], ["weights"]],
    2: [["equality", "float32", MODELS[2], *ROUNDING], ["example", "after"]]
    + [[name] for name in ("refused", "refused_biased", "rotary", "alone", "memory")],
}


def run(size: int, folder, *tasks: list) -> str:
    """Let `size` ranks do tasks, which check what they compute. Return their output."""
    line = "tests/model_center_rank.py", folder, json.dumps(tasks)
    if GPUS:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
        given = os.environ.get("PYTHONPATH", "")  # folders of packages that are not installed
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [given])])
        done = torchrun(size, *line, python=["-W", "ignore"], env=environment, timeout=600)
        code, printed, errors = done.returncode, done.stdout, done.stderr
    else:
        (code, printed), errors = run_script(size, *line), ""
    assert code == 0, printed[-7000:] + errors[-5000:]
    return printed


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> Callable[[int], str]:
    """What so many ranks print in their run."""
    return functools.cache(lambda size: run(size, tmp_path_factory.mktemp("ranks"), *RUNS[size]))


@on_cpus
@pytest.mark.parametrize(("size", "calls"), [(1, 5), (2, 26)])
def test_enabled_models_equal_those_of_one_rank(size, calls, printed):
    """Every family. Padding, documents, embeddings given; training and not.

    Where there is a learned bias also contexts, spans and segments, and its table's gradient. Two
    ranks also check what is refused, rotary angles, generation and memory.
    """
    assert printed(size).count(f"compared {calls} calls") == size


@on_cpus
def test_a_few_lines_make_a_script_sequence_parallel(printed):
    """One rank with a whole sequence, and two ranks with a half each."""
    before, after = (
        re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", printed(size)) for size in (1, 2)
    )
    assert len(before) == 5
    assert before == after


@on_gpus
@pytest.mark.parametrize(
    ("dtype", "loss_bound", "bound"),
    [
        ("float32", 1e-5, 1e-4),  # rounding, of sums in another order
        # ModelCenter rounds scores and probabilities to the dtype, kernels do not
        ("float16", 1e-3, 1e-2),
        ("bfloat16", 1e-2, 1e-1),
    ],
)
def test_enabled_models_equal_those_of_one_gpu(dtype, loss_bound, bound, tmp_path):
    models = dict.fromkeys(("Llama", "GPT2", "GPTj", "CPM1", "CPM3"))
    assert "compared" in run(2, tmp_path, ["equality", dtype, models, loss_bound, bound])


@on_gpus
def test_a_few_lines_make_a_script_sequence_parallel_on_gpus(tmp_path):
    """One rank with a whole sequence, and two ranks with a half each, in fp16."""
    said = [run(size, tmp_path, ["example", name]) for size, name in ((1, "before"), (2, "after"))]
    curves = [re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", text) for text in said]
    assert len(curves[0]) == len(curves[1]) == 20
    for before, after in zip(*curves, strict=True):
        assert float(after[0]) == pytest.approx(float(before[0]), rel=1e-2)
        assert float(after[1]) == pytest.approx(float(before[1]), rel=5e-2)
