"""Pages of the documentation: they build, say what the code says, and their commands run.

`python -m tests.test_pages` prints the plan of docs/design.md again.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import bmt_burst
from models.huggingface import save_weights
from tests.launcher import ROOT
from tests.preparing import write_tokens
from tests.test_export import SENTENCES, byte_level_bpe
from tests.test_model import SMALL, initialized
from tests.test_readme import blocks, commands, run_command
from train.base.ranks import LOST_CONTACT
from train.base.signals import INTERRUPTED
from train.data.tokenizer import ByteTokenizer
from train.loop.progress import learning_rate
from train.loop.stages import parse_run
from train.planning.search import Cluster, as_run, plan
from train.planning.seconds import GPUS
from train.run.watchdog import EXIT_CODE
from train.settings.config import TrainConfig
from train.settings.options import read_values

TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()


def strings_of_the_code() -> set[str]:
    """Return the code's texts, with "..." for each value that is filled in."""
    found = set()
    for folder in ("bmt_burst", "models", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [x.value if isinstance(x, ast.Constant) else "..." for x in node.values]
                    found.add("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def test_every_message_stands_in_the_code():
    messages = re.findall(r"^\| `(.*?)` \|", TROUBLES, re.MULTILINE)
    assert len(messages) == 10
    code = strings_of_the_code()
    assert not [x for x in messages if not any(x in text for text in code)]


def test_exit_codes_are_those_of_the_code():
    codes = re.findall(r"^\| (\d+) \| (.*) \|", TROUBLES, re.MULTILINE)
    assert dict(codes)[str(EXIT_CODE)].startswith("hung")
    assert dict(codes)[str(LOST_CONTACT)].startswith("lost")
    assert dict(codes)[str(INTERRUPTED)].startswith("was ended at once")


OFFLINE = {
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "NO_MKDOCS_2_WARNING": "1",
}


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: bmt_burst\.(\w+)$", page, re.MULTILINE))
    assert set(bmt_burst.__all__) - listed == {"IGNORE_INDEX"}, "docs/api.md"


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("material"), reason="mkdocs-material is not installed"
)
def test_the_site_builds_without_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    options = {"cwd": ROOT, "env": {**os.environ, **OFFLINE}, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    assert {"index.html", "attention.html", "design.html", "api.html"} <= pages.keys()
    assert "When to choose what" in pages["index.html"]
    # the navigation, whose entries docs/hooks.py finds
    for name in ("results-masks.html", "mechanisms.html"):
        assert f'href="{name}"' in pages["design.html"]
    api = re.sub(r"<[^>]+>", "", pages["api.html"])
    assert "burst_attn_func(\n    q: Tensor,\n" in api, "signatures are broken into lines"
    assert 'id="bmt_burst.burst_attn_func"' in pages["api.html"]
    for internal in ("Chunks.take_turn", "Chunks.forget", "Cache.variant"):
        assert f'id="bmt_burst.{internal}"' not in pages["api.html"]
    loaded = (
        r"<(?:script[^>]*src|link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href)=\"(https?:[^\"]*)"
    )
    assert not [re.findall(loaded, page) for page in pages.values() if re.search(loaded, page)]


DESIGN = ROOT / "docs/design.md"
_PRINTED = re.compile(r"(```python\n(.*?)```\n\n<!-- printed -->\n```\n).*?(```\n)", re.DOTALL)


def with_printed(text: str) -> str:
    """A page with what its code prints, where that is marked."""

    def printed(match: re.Match) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(match[2], {})
        return match[1] + output.getvalue() + match[3]

    return _PRINTED.sub(printed, text)


def test_the_plan_it_shows_is_what_the_code_prints():
    text = DESIGN.read_text()
    assert len(_PRINTED.findall(text)) == text.count("<!-- printed -->") == 1
    assert with_printed(text) == text, "python -m tests.test_pages prints it again"


def test_examples_in_docstrings_print_something(capsys):
    """With the package's public names and those of the module itself."""
    tried = 0
    for path in (ROOT / "bmt_burst").rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"Try\s`(.+?)`\.", docstring):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            exec(line, {**vars(bmt_burst), **vars(importlib.import_module(module))})
            assert capsys.readouterr().out.strip(), line
            tried += 1
    assert tried > 3


def test_every_file_it_names_is_there():
    names = set(re.findall(r"`([\w/]+\.(?:py|sh|md))`", DESIGN.read_text()))
    assert len(names) > 20
    folders = "kernels", "strategies", "strategies/ring"
    places = [ROOT, ROOT / "bmt_burst", *(ROOT / "bmt_burst" / folder for folder in folders)]
    for name in names:
        assert any((place / name).is_file() for place in places), name


def test_every_name_it_uses_is_in_the_code():
    paths = [path for part in ("bmt_burst", "tests") for path in (ROOT / part).rglob("*.py")]
    code = "\n".join(path.read_text() for path in paths)
    prose = re.sub(r"```.*?```", "", DESIGN.read_text(), flags=re.DOTALL)
    names = {
        name
        for quoted in re.findall(r"`([^`]+)`", prose)
        for name in re.findall(r"[A-Za-z_]\w+", quoted)
    }
    files = {
        name for path in paths for part in path.relative_to(ROOT).parts for name in part.split(".")
    }
    words = set(re.findall(r"\w+", code))
    assert len(names) > 60
    assert names - files <= words


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


CONTINUE = ROOT / "docs/continue.md"
FEWER = {
    "8K,64K": "200,400",
    "--seq-len 64K": "--seq-len 400",
    "--batch-size 16 --steps 1000": "--batch-size 2 --steps 2",
    "--warmup-steps 50 --decay-steps 200": "--warmup-steps 1 --decay-steps 1",
}


@pytest.mark.slow
def test_the_commands_run_from_a_folder_to_comparable_numbers_and_an_export(tmp_path):
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    backend = byte_level_bpe(300, "<unk>", "</s>")
    backend.save(str(folder / "tokenizer.json"))
    config = dataclasses.replace(SMALL, vocab_size=backend.get_vocab_size())
    weights = {name: p.detach() for name, p in initialized(config).named_parameters()}
    save_weights(folder, config, weights, max_position_embeddings=200)
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": SENTENCES[0] * 20 + str(i)}) + "\n" for i in range(300))
    )
    lines, printed = commands(CONTINUE, "# Continue a Hugging Face folder"), []
    for line in lines:
        for old, new in FEWER.items():
            line = line.replace(old, new)
        few = ("--samples", "1") if "evaluate.py" in line else ()
        printed.append(run_command(line.replace("Qwen3-0.6B", str(folder)), tmp_path, *few))
    assert not any(size in "".join(printed) for size in ("64K", "65,536", "8,192"))
    table = (tmp_path / "runs/after/before_after.md").read_text()
    assert table in printed[3]
    assert f"before: {folder}\nafter: {tmp_path}/runs/mine/step_00000002\n" in table
    for row in ("needle, found | 400 | depth 0.25", "positions, perplexity | 200 | from 0"):
        assert re.search(rf"^\| {re.escape(row)} \| \S+ \| \S+ \|$", table, re.MULTILINE), table
    options = json.loads((tmp_path / "runs/after/results.json").read_text())["options"]
    assert options["dtype"] == "bf16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported/mine")
    assert loaded.config.max_position_embeddings == 400


def rates(steps: int, **options) -> list[float]:
    settings = TrainConfig(steps=steps, **options)
    return [learning_rate(step, settings) for step in range(1, steps + 1)]


def test_which_runs_may_be_extended():
    given = {"warmup_steps": 10, "decay_steps": 20}
    short, long = rates(100, **given), rates(150, **given)
    assert short[:80] == long[:80] and short[80] < long[80]
    assert math.isclose(short[-1], 0.05 * short[40])
    assert rates(100)[:80] != rates(150)[:80]  # the warm-up is a share of the steps
    for schedule in ("cosine", "linear"):
        short, long = (rates(n, schedule=schedule, **given) for n in (100, 150))
        assert all(x < y for x, y in zip(short[10:], long[10:100], strict=True))


SLURM = ROOT / "docs/slurm.md"
# As on two hosts, srun starts the command twice, and fails if one of the two fails.
STAND_INS = {
    "scontrol": 'printf "localhost\\nlocalhost\\n"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@" & "$@" & wait -n && wait -n',
    "activate": f'export PATH="{Path(sys.executable).parent}:$PATH"',
}
VARIABLES = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_every_block_is_bash_and_the_options_are_those_of_a_run():
    scripts = blocks(SLURM, "bash")
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [options] = blocks(SLURM, "toml")
    config = TrainConfig(**read_values(tomllib.loads(options), "run.toml"))
    assert (config.model, config.sp_size) == ("minicpm4-8b", 8)


@pytest.mark.slow
def test_two_launchers_share_a_sequence_by_the_script(tmp_path):
    write_tokens(tmp_path / "data", ByteTokenizer(), "Once there were 3 rings. " * 40)
    options = {"data": str(tmp_path / "data"), "output": str(tmp_path / "run"), "sp_size": 2}
    options |= {"model": "cpm-tiny", "seq_len": 64, "batch_size": 1, "steps": 2}
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    (tmp_path / "run.toml").write_text("".join(lines))
    (tmp_path / "train").symlink_to(ROOT / "train")
    commands = tmp_path / ".venv/bin"
    commands.mkdir(parents=True)
    for name, script in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{script}\n")
        (commands / name).chmod(0o755)
    place = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", blocks(SLURM, "bash")[0]],
        env={**os.environ, **VARIABLES, **place},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 data parallel x 2 sequence parallel ranks" in done.stdout
    assert (tmp_path / "run/step_00000002/rank_00001.safetensors").is_file()


if __name__ == "__main__":
    DESIGN.write_text(with_printed(DESIGN.read_text()))
