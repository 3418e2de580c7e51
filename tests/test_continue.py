"""The commands of docs/continue.md, on a small folder, and what the page says of schedules."""

import dataclasses
import json
import math
import re

import pytest
from transformers import AutoModelForCausalLM

from models.huggingface import save_weights
from tests.launcher import ROOT
from tests.test_export import SENTENCES, byte_level_bpe
from tests.test_model import SMALL, initialized
from tests.test_readme import commands, run_command
from train.loop.progress import learning_rate
from train.settings.config import TrainConfig

PAGE = ROOT / "docs/continue.md"
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
    lines, printed = commands(PAGE, "# Continue a Hugging Face folder"), []
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
