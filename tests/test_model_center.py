"""Models of ModelCenter over BMTrain's own Python code, on CPUs: see model_center_rank.py and
fake_cuda.py; and on GPUs, where two ranks that share sequences equal one GPU.
"""

import functools
import json
import math
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
# by the number of ranks: which are compared, in which calls; None: in all that are meant for it
MODELS = {
    1: {"CPM1": FEW, "CPM3": FEW},
    2: dict.fromkeys(model_center_rank.CONFIGS)
    | dict.fromkeys(("GPTj", "GPT2", "OPT", "Roberta"), ("documents of rows",)),
}
RUNS = {  # what ranks do, in one process each
    1: [["equality", "float32", MODELS[1]], ["example", "before"], ["weights"]],
    2: [["equality", "float32", MODELS[2]], ["example", "after"]]
    + [[name] for name in ("refused", "refused_biased", "rotary", "alone", "memory")],
}


def run(size: int, results, *tasks: list[str]) -> tuple[dict[str, list], str]:
    """Return the findings of `size` ranks by task, and their output."""
    line = "tests/model_center_rank.py", results, json.dumps(tasks)
    if GPUS:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
        given = os.environ.get("PYTHONPATH", "")  # folders of packages that are not installed
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [given])])
        done = torchrun(size, *line, python=["-W", "ignore"], env=environment, timeout=600)
        code, printed, errors = done.returncode, done.stdout, done.stderr
    else:
        (code, printed), errors = run_script(size, *line), ""
    assert code == 0, printed[-2000:] + errors[-5000:]
    ranks = [json.loads((results / f"{rank}.json").read_text()) for rank in range(size)]
    return {task[0]: list(found) for task, *found in zip(tasks, *ranks, strict=True)}, printed


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[[int], tuple[dict[str, list], str]]:
    """What so many ranks find in their run, and say."""
    return functools.cache(lambda size: run(size, tmp_path_factory.mktemp("ranks"), *RUNS[size]))


def check_equality(found: list[dict], loss_bound: float, bound: float) -> None:
    """Compare losses, and gradients of each parameter."""
    for name, calls in found[0].items():
        assert calls.pop("keys"), name
        for call, result in calls.items():
            # A sum of some thousand numbers around 1.
            close = pytest.approx(result["expected"], rel=loss_bound, abs=10 * loss_bound)
            assert result["got"] == close, (name, call)
            assert result["evaluated"] == close, (name, call)
            assert result["last_row"] == 0, (name, call)
            error, parameter = result["worst"]
            assert error < bound, (name, call, parameter)


@on_cpus
@pytest.mark.parametrize("size", [1, 2])
def test_enabled_models_equal_those_of_one_rank(size, found):
    """Every family, in fp32: rounding through two layers. Padding, documents, embeddings given;
    training and not.

    Where there is a learned bias also contexts, spans and segments, and its table's gradient.
    """
    ranks = found(size)[0]["equality"]
    assert (
        sum(len(calls - {"keys"}) for calls in map(dict.keys, ranks[0].values()))
        == {1: 5, 2: 33}[size]
    )
    check_equality(ranks, 1e-5, 1e-5)


@on_cpus
def test_what_is_wrong_is_refused_on_all_ranks_and_changes_nothing(found):
    """model_center_rank.py has the calls, each with its error."""
    for errors in (*found(2)[0]["refused"], *found(2)[0]["refused_biased"]):
        for expected, error in errors:
            assert error.startswith(expected)


@on_cpus
def test_rotary_angles_are_those_of_modelcenter_or_exact(found):
    """fp16 rounds the angles of 2200 positions by up to a radian, and both models alike; fp32 by
    1e-4.
    """
    for rank in found(2)[0]["rotary"]:
        assert rank["frequencies"].startswith(
            "ValueError: position 65999 is infinite in torch.float16"
        )
        for name in ("Llama", "GPTj"):
            of_model = {
                key.removeprefix(name).strip(): x for key, x in rank.items() if key.startswith(name)
            }
            assert of_model["torch.float16"] < 1e-3
            assert of_model["torch.float32"] < 1e-3
            assert of_model["refused"].startswith(
                "ValueError: position 65999 is infinite in torch.float16"
            )
            expected = [math.cos(1), math.cos(66000)], [math.sin(1), math.sin(66000)]
            assert of_model["exact"] == [pytest.approx(x, abs=1e-6) for x in expected]


@on_cpus
def test_a_model_for_one_rank_generates_as_before(found):
    for rank in found(2)[0]["alone"]:
        assert rank["same"] and rank["generated"]
        assert all(rank[name] < 1e-6 for name in ("hidden", "logits", "loss"))
        assert rank["refused"].startswith("ValueError: expected a cache or mask and layout")


@on_cpus
def test_a_dense_cpm_reads_the_weights_of_a_llama(found):
    """test_weights.py has the names of other models."""
    read = found(1)[0]["weights"][0]
    assert read["Llama"] < 1e-5
    assert read["Llama tied"] < 1e-5


@on_cpus
def test_no_tensor_is_as_large_as_a_mask(found):
    """Nor, of a model with a learned bias, larger than the scores that CPUs write out for that: of
    4 heads, a block.
    """
    for rank in found(2)[0]["memory"]:
        for name, most in (("Llama", 1), ("CPM1", 4)):
            assert rank[f"{name} before"] >= 700**2
            assert rank[f"{name} after"] <= most * rank["tokens"] ** 2


@on_cpus
def test_a_few_lines_make_a_script_sequence_parallel(found):
    """One rank with a whole sequence, and two ranks with a half each."""
    before, after = (
        re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", found(size)[1]) for size in (1, 2)
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
    found = run(
        2, tmp_path, ["equality", dtype, dict.fromkeys(("Llama", "GPT2", "GPTj", "CPM1", "CPM3"))]
    )[0]["equality"]
    assert len(found[0]) == 5
    check_equality(found, loss_bound, bound)


@on_gpus
def test_a_few_lines_make_a_script_sequence_parallel_on_gpus(tmp_path):
    """One rank with a whole sequence, and two ranks with a half each, in fp16."""
    said = [
        run(size, tmp_path, ["example", name])[1] for size, name in ((1, "before"), (2, "after"))
    ]
    curves = [re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", text) for text in said]
    assert len(curves[0]) == len(curves[1]) == 20
    for before, after in zip(*curves, strict=True):
        assert float(after[0]) == pytest.approx(float(before[0]), rel=1e-2)
        assert float(after[1]) == pytest.approx(float(before[1]), rel=5e-2)
