"""CPM-Bee and CPM-Ant from text to a trained model that answers, as users run it, on one rank and
on several.
"""

import itertools
import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from bmt_burst import kernels
from models.cpm_ant import CPMAnt
from models.cpm_bee import CPMBee
from models.cpm_live.config import PRESETS
from tests.launcher import ROOT
from tests.live import SMALL_LIVE, as_jsonl, changed
from tests.preparing import prepare
from tests.refusals import refused_line
from tests.runs import forget, read_records, records
from tests.test_bmtrain import run_pretrain
from tests.test_readme import commands, run_command
from tests.test_train import command, curve, train
from train import export, generate, make_vocabulary
from train.cpm_live.vocabulary import escaped

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("name", ["bee", "ant"])
STEPS = 6
SHAPE = {**SMALL_LIVE, "num_layers": 2, "vocab_size": 200}
OPTIONS = {"seq_len": 96, "batch_size": 4, "micro_batch_size": 2, "steps": STEPS, "lr": 0.02}
OPTIONS["warmup_steps"] = 2


def functions() -> list[tuple[str, str]]:
    """Return heads and bodies of short functions of Python's library, the quickstart's text."""
    found = []
    for name in ("bisect", "heapq", "textwrap", "stat", "shlex", "queue"):
        lines = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text().splitlines()
        stripped = [line.strip() for line in lines]
        pairs = itertools.pairwise(stripped)
        found += [pair for pair in pairs if pair[0].startswith("def ") and pair[0].endswith(":")]
    return [(head, body) for head, body in found if len(head) + len(body) < 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Instances of both models, with a vocabulary that is made of them, and small models."""
    folder = tmp_path_factory.mktemp("live")
    rest = {"<mask_0>": "of <mask_1> é", "<mask_1>": "x"}
    bees = [
        {"head": escaped(head), "<ans>": {"body": escaped(body), **rest}}
        for head, body in functions()
    ]
    bees = [[bee, bees[i - 1]] if i % 4 == 0 else bee for i, bee in enumerate(bees)]
    ants = [
        {"text": f"{head}\n {body}", "task": ("lm", "mlm")[i % 2]}
        for i, (head, body) in enumerate(functions())
    ]
    for name, lines in (("bee", bees), ("ant", ants)):
        text, vocabulary = folder / f"{name}.jsonl", folder / f"{name}.txt"
        as_jsonl(text, lines)
        inputs = ["--input", str(text), "--output", str(vocabulary)]
        make_vocabulary.main(["--model", f"cpm-{name}", "--size", "200", *inputs])
        tokenizer = f"cpm-{'ant-greedy' if name == 'ant' else name}:{vocabulary}"
        # all of them fit into a row: a hash might choose only those that are too long
        val = sorted(lines, key=lambda line: len(json.dumps(line)))[:50:5]
        for part, chosen in (("train", [x for x in lines if x not in val]), ("val", val)):
            file = as_jsonl(folder / f"{name}-{part}.jsonl", chosen)
            output = folder / f"{name}-{part}"
            prepare("--input", file, "--tokenizer", tokenizer, "--output", output)
        config = changed(PRESETS[f"cpm-{name}-tiny"], **SHAPE)
        (folder / f"{name}.json").write_text(json.dumps(config.to_dict()))
    return folder


def options(folder, name, **more):
    files = {"model": folder / f"{name}.json", "data": folder / f"{name}-train/train"}
    return OPTIONS | files | more


def evaluated(folder, name) -> dict:
    sizes = {"eval_every": 3, "eval_sequences": 3, "save_every": 3, "keep_last": 9}
    return {"val_data": folder / f"{name}-val/train", **sizes}


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, list[tuple]]:
    """Losses and gradient norms of one process, of both models. All other ways must reproduce
    them.
    """
    found = {}
    for name in ("bee", "ant"):
        printed = train(folder, name, **options(folder, name, **evaluated(folder, name)))
        counts = r"\d+ instances?(, \d+ longer than a row (is|are) (left out|cut))?"
        assert re.search(rf"sequences an epoch, {counts}; validation: {counts}\n", printed)
        found[name] = curve(folder, name, "loss", "grad_norm")
    return found


@pytest.mark.parametrize(("name", "processes"), [("bee", 4), ("ant", 2)])
def test_losses_and_gradient_norms_do_not_depend_on_the_ranks(folder, whole, name, processes):
    """In fp32, with sums in other orders, whose rounding later steps carry on."""
    output = f"{name}-ranks"
    train(folder, output, processes=processes, **options(folder, name, sp_size=2, stop_after=3))
    expected = [pytest.approx(row, rel=1e-5) for row in whole[name][:3]]
    assert curve(folder, output, "loss", "grad_norm") == expected


@BOTH
def test_the_run_learns_and_leaves_its_records(folder, whole, name):
    assert whole[name][-1][1] < whole[name][0][1] - 0.3
    for r in read_records(folder / name):
        assert "val_loss" in r or 4 <= r["instances"] < r["targets"]
    assert list(records(folder / name, "val_loss")) == [3, 6]
    assert {*records(folder / name, "balance").values()} == {1.0}


@BOTH
def test_a_resumed_run_equals_one_that_was_not_stopped(folder, whole, name):
    """Bit for bit, in the middle of an epoch: rows, orders of answers and hidden tokens are the
    same. The checkpoint has the model.
    """
    output = f"{name}-resumed"
    shutil.copytree(folder / name, folder / output)
    forget(folder / output, 6)
    same = options(folder, name, resume="auto", **evaluated(folder, name))
    same["model"] = None
    assert "resumed after step 3" in train(folder, output, **same)
    assert curve(folder, output, "loss", "grad_norm") == whole[name]
    printed = train(folder, output, code=2, **same | {"seq_len": 120})
    assert "was reading other data: --seq-len 96 -> 120" in printed
    other = options(folder, {"bee": "ant", "ant": "bee"}[name], resume="auto")
    assert "holds another model: " in train(folder, output, code=2, **other)


@pytest.mark.skipif(not kernels.installed("bmtrain"), reason="needs the package bmtrain")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with GPUs test_gpu_train.py runs BMTrain as it is"
)
def test_bmtrain_gives_the_same(folder, whole, tmp_path):
    name = "bee"
    more = options(folder, name, sp_size=2, stop_after=3)
    printed = run_pretrain(2, tmp_path, command(folder, f"{name}-bmtrain", **more))
    assert "BMTrainEngine" in printed
    expected = [pytest.approx(row, rel=1e-5) for row in whole[name][:3]]
    assert curve(folder, f"{name}-bmtrain", "loss", "grad_norm") == expected


def test_a_bee_fills_in_blanks_and_an_ant_continues_a_text(folder, whole, capsys):
    ant = ["--run", str(folder / "ant"), "--tokens", "12", "--seed", "1"]
    generate.main([*ant, "--prompt", "def f(x"])
    printed = capsys.readouterr().out
    assert printed.startswith("def f(x") and len(printed) > len("def f(x\n")
    prompt = [
        {"head": "def f(x):", "<ans>": {"body": "", "<mask_0>": "of <mask_1>"}},
        {"head": "q<<", "<ans>": "x"},
    ]
    run = ["--run", str(folder / "bee"), "--tokens", "6", "--temperature", "0", "--prompt"]
    generate.main([*run, json.dumps(prompt)])
    printed = capsys.readouterr().out
    main, sample = json.loads(printed)
    assert sample == prompt[1]
    assert main["head"] == "def f(x):"
    assert list(main["<ans>"]) == ["body", "<mask_0>"]
    assert main["<ans>"]["<mask_0>"].startswith("of <mask_1>")
    generate.main([*run, json.dumps(prompt)])
    assert capsys.readouterr().out == printed
    for wrong, message in (
        ("text", "must be an instance as JSON"),
        ('{"a": "b"}', "there is nothing to fill in"),
    ):
        assert message in refused_line(capsys, generate.main, *run, wrong)


@BOTH
def test_weights_are_exported_and_read_in_cpm_lives_format(folder, whole, name, capsys):
    """The models load a file of names and tensors as it is, and a run starts from it."""
    output = folder / f"{name}-exported"
    flags = ["--run", str(folder / name), "--output", str(output)]
    no_format = f"a cpm-{name} has no Hugging Face format here: give --format bmtrain"
    assert no_format in refused_line(capsys, export.main, *flags)
    export.main([*flags, "--format", "bmtrain", "--dtype", "fp16"])
    weights = torch.load(output / "model.pt", weights_only=True)
    config = changed(PRESETS[f"cpm-{name}-tiny"], **SHAPE)
    assert json.loads((output / "model.json").read_text()) == config.to_dict()
    model = {"bee": CPMBee, "ant": CPMAnt}[name](config)
    model.load_state_dict(weights)
    assert {w.dtype for w in weights.values()} == {torch.float16}
    source = output / "model.pt"
    if name == "bee":  # as CPM-Live publishes it
        source = folder / "published"
        source.mkdir()
        shutil.copy(output / "model.pt", source / "pytorch_model.bin")
        shutil.copy(output / "model.json", source / "config.json")
    more = {"init_from": source, "steps": 1, "lr": 1e-30, "warmup_steps": 0, "save_every": 0}
    train(folder, f"{name}-from", **options(folder, name, **evaluated(folder, name) | more))
    losses = [read_records(folder / output)[-1]["val_loss"] for output in (name, f"{name}-from")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # weights were rounded to fp16


def test_the_commands_of_the_page_run_as_they_stand(tmp_path):
    """But for where their files are. The lines of data that it shows are read, too."""
    page = (ROOT / "docs/cpm-bee.md").read_text()
    shown = re.search(r"```json\n(.*?)```", page, re.DOTALL)[1]
    sums = [{"question": f"{i} + {j}", "<ans>": str(i + j)} for i in range(9) for j in range(9)]
    (tmp_path / "instances.jsonl").write_text(
        shown + "".join(json.dumps(line) + "\n" for line in sums)
    )
    lines = commands(ROOT / "docs/cpm-bee.md", "# CPM-Bee and CPM-Ant")
    printed = [run_command(line, tmp_path) for line in lines]
    assert "data/bee/train: " in printed[1] and "84 instances" in printed[1]
    assert "bad lines" not in printed[1]
    assert "1 data parallel x 2 sequence parallel ranks" in printed[2]
    assert json.loads(printed[3].splitlines()[-1])["question"] == "2 + 3"
    assert (tmp_path / "exported/bee/model.pt").is_file()
