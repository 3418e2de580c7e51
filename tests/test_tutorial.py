"""The tutorial's commands as they stand, and the stages that the pages show."""

import json
import re
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.test_readme import blocks, commands, run_command
from train.loop.stages import parse_run
from train.planning.search import Cluster, as_run, plan
from train.planning.seconds import GPUS

STAGES = ROOT / "examples/stages.toml"


def test_the_tutorial_shows_the_stages_of_its_file():
    assert blocks(ROOT / "docs/tutorial.md", "toml") == [STAGES.read_text()]


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run_as_they_stand(tmp_path):
    """In fewer steps, of fewer sequences, with fewer needles."""
    fewer = re.sub(r"(?m)^(steps|batch_size|eval_sequences) = .*", r"\1 = 2", STAGES.read_text())
    (tmp_path / "stages.toml").write_text(fewer.replace('"data/', f'"{tmp_path}/data/'))
    printed = ""
    for line in commands(ROOT / "docs/tutorial.md", "# Tutorial: from text to a heat map"):
        there = line.replace("examples/stages.toml", f"{tmp_path}/stages.toml")
        more, ranks = (), None
        if "train/pretrain.py" in line:  # it has the number of processes in its file
            more, ranks = ("--output", f"{tmp_path}/runs/tutorial"), 2
        if "train/evaluate.py" in line:
            more = "--samples", "1", "--eval-sequences", "2"
        printed += run_command(there, tmp_path, *more, ranks=ranks)
    assert "2 data parallel x 1 sequence parallel rank;" in printed
    assert "1 data parallel x 2 sequence parallel ranks;" in printed
    assert f"all 2 stages of {tmp_path}/stages.toml are done" in printed
    runs, name = tmp_path / "runs/tutorial", "evaluation_step_00000002"
    assert (runs / "01-short" / name / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "02-long" / name / "positions.png").read_bytes().startswith(b"\x89PNG")
    cells = json.loads((runs / "02-long" / name / "results.json").read_text())["tasks"]["needle"]
    assert {cell["length"] for cell in cells["cells"]} == {64, 256, 1024}
    assert list((tmp_path / "exported/tutorial").glob("*.safetensors"))


def test_the_recipe_is_a_file_of_stages_as_it_says(tmp_path: Path):
    [recipe] = blocks(ROOT / "docs/recipe.md", "toml")
    (tmp_path / "stages.toml").write_text(recipe)
    _, stages = parse_run(["--stages", str(tmp_path / "stages.toml")])
    lengths = {stage.name: stage.config.seq_len for stage in stages.all}
    assert lengths == {"4k": 4096, "32k": 2**15, "128k": 2**17, "512k": 2**19}
    tokens = [stage.config.steps * 2**22 for stage in stages.all]
    assert tokens == pytest.approx([8e12, 20e9, 5e9, 2.5e9], rel=0.01)
    for stage in stages.all:
        config = stage.config
        assert config.batch_size * config.seq_len == 2**22
        assert config.batch_size % (64 // config.sp_size) == 0, "on 64 GPUs"
        assert config.model_config().sparse


def test_the_stages_of_minicpm_sala_have_the_plan_that_the_page_says():
    page = ROOT / "docs/recipe.md"
    _, stages = parse_run(["--stages", str(ROOT / "examples/sala.toml")])
    tokens, rates, rows = [], [], []
    for stage in stages.all:
        config = stage.config
        sparse = config.model_config().sparse
        assert sparse.is_dense(config.seq_len) == (stage.name == "4k")
        tokens.append(config.steps * config.batch_size * config.seq_len / 1e9)
        rates.append(config.lr * config.min_lr_ratio)
        h200, h100 = (
            as_run(plan(config, Cluster(64, GPUS[name].gib, GPUS[name]), "bmtrain"))
            for name in ("h200", "h100")
        )
        assert h200.fits and h100.fits
        assert h100.seconds.total == pytest.approx(h200.seconds.total, rel=0.05)
        seconds = h200.seconds.total
        numbers = h200.step.memory.total / 2**30, seconds, seconds * config.steps / 86400
        rows += [(stage.name, pytest.approx(numbers, rel=0.04))]
    assert tokens == pytest.approx([314.6 + 1006.6, 102.2, 62.9, 50.6], rel=1e-3)
    assert rates[1:] == pytest.approx([2e-4, 1e-4, 3.75e-5], rel=1e-3)
    cells = re.findall(r"^\| (\d+k) \| (.+) \| (.+) \| (.+) \|$", page.read_text(), re.MULTILINE)
    assert [(name, tuple(map(float, numbers))) for name, *numbers in cells] == rows
    inferred = (1920, 4096, 168_000), (240, 2**15, 13_000), (60, 163_840, 6400), (19, 532_480, 5000)
    published = [x * y * z / 1e9 for x, y, z in inferred]
    assert published == pytest.approx([314.6 + 1006.6, 102.2, 62.9, 50.6], rel=1e-3)
