"""The BMTrain engine, transport, layer and examples over BMTrain's own Python code, on CPUs: see
fake_cuda.py.
"""

import json
import re

import pytest
import torch

from bmt_burst import SequenceParallel, kernels
from models.cpm import CPM
from tests.bmtrain_rank import SHAPES
from tests.bmtrain_rank import curve as engine_curve
from tests.launcher import run_script, world_of_one
from tests.runs import forget
from tests.test_train import command, curve, folder, train  # noqa: F401 - folder is a fixture
from train.engine.torch import TorchEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.installed("bmtrain"), reason="needs the package bmtrain"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="with GPUs test_gpu_train.py runs BMTrain as it is"
    ),
]


def run(size: int, results, what: str, *arguments: str) -> tuple[list[dict], str]:
    """Return the findings of `size` ranks, and their output."""
    code, printed = run_script(size, "tests/bmtrain_rank.py", results, what, *arguments)
    assert code == 0, printed[-7000:]
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(size)], printed


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """The torch engine's curve of each shape on one rank."""
    with world_of_one():
        engines = {
            name: TorchEngine(lambda c=c: CPM(c), device=torch.device("cpu"), seed=3)
            for name, c in SHAPES.items()
        }
        return {name: engine_curve(engine, SequenceParallel()) for name, engine in engines.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_engine_equals_the_torch_engine(size, expected, tmp_path):
    """Losses and gradient norms, sequence parallel over BMTrain's communicators, in fp32.

    Ranks also check what is saved and loaded, and the layer.
    """
    for curves in run(size, tmp_path, "library")[0]:
        assert len(curves) == 6
        for name, value in curves.items():
            assert value == pytest.approx(expected[name.split()[-1]], rel=1e-5), name


def test_pretraining_and_checkpoints_do_not_depend_on_the_engine(tmp_path, folder):  # noqa: F811
    """Two ranks on BMTrain; from step 2 on again on torch, one process; from step 3 on again
    BMTrain, three ranks.
    """
    train(folder, "torch-alone", steps=3)
    expected = [
        pytest.approx(row, rel=1e-5) for row in curve(folder, "torch-alone", "loss", "grad_norm")
    ]
    options = {"steps": 3, "save_every": 1, "keep_last": 9, "resume": "auto", "mlp_tile": 11}
    options |= {"checkpointing": "full", "checkpointing_every": 2}
    printed = run_pretrain(2, tmp_path, command(folder, "engines", sp_size=2, **options))
    assert "BMTrainEngine" in printed
    assert curve(folder, "engines", "loss", "grad_norm") == expected
    forget(folder / "engines", 2, 3)
    train(folder, "engines", **options)
    assert curve(folder, "engines", "loss", "grad_norm") == expected
    forget(folder / "engines", 3)
    run_pretrain(3, tmp_path, command(folder, "engines", sp_size=3, **options))
    assert curve(folder, "engines", "loss", "grad_norm") == expected


def run_pretrain(size, results, command_line) -> str:
    found, printed = run(size, results, "pretrain", *command_line[2:])
    assert [rank["code"] for rank in found] == [0] * size
    return printed


def test_a_few_lines_make_a_script_sequence_parallel(tmp_path):
    """One rank with a whole sequence, and two ranks with a half each."""
    printed = [
        run(size, tmp_path, "example", name)[1] for size, name in ((1, "before"), (2, "after"))
    ]
    before, after = (re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", text) for text in printed)
    assert len(before) == 5
    assert before == after
