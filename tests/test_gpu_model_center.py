"""Models of ModelCenter on GPUs, with BMTrain as it is: two ranks that share sequences equal one
GPU.
"""

import re

import pytest

from bmt_burst import kernels
from tests.launcher import needs_ranks
from tests.test_model_center import check_equality, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    needs_ranks(2),
    pytest.mark.skipif(not kernels.installed("bmtrain"), reason="needs the package bmtrain"),
    pytest.mark.skipif(
        not kernels.installed("model_center"), reason="needs the package model-center"
    ),
]


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


def test_a_few_lines_make_a_script_sequence_parallel(tmp_path):
    """One rank with a whole sequence, and two ranks with a half each, in fp16."""
    said = [
        run(size, tmp_path, ["example", name])[1] for size, name in ((1, "before"), (2, "after"))
    ]
    curves = [re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", text) for text in said]
    assert len(curves[0]) == len(curves[1]) == 20
    for before, after in zip(*curves, strict=True):
        assert float(after[0]) == pytest.approx(float(before[0]), rel=1e-2)
        assert float(after[1]) == pytest.approx(float(before[1]), rel=5e-2)
