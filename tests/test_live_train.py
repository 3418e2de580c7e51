"""CPM-Bee and CPM-Ant from text to a trained model that answers, as users run it, on one rank and
on several.
"""

import json
import re
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from bmt_burst import kernels
from models.cpm_ant import CPMAnt
from models.cpm_bee import CPMBee
from models.cpm_live.config import PRESETS
from tests.helpers import ROOT, run_script
from tests.live import changed
from tests.preparing import prepare
from tests.test_bmtrain import run_pretrain
from tests.test_train import command, curve, train
from train import export, generate, make_vocabulary
from train.checkpoints import checkpoint
from train.cpm_live.vocabulary import escaped

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("name", ["bee", "ant"])
STEPS = 6
SHAPE = {
    "dim_model": 32,
    "num_heads": 2,
    "dim_head": 16,
    "dim_ff": 48,
    "num_layers": 2,
    "vocab_size": 200,
}
OPTIONS = {
    "seq_len": 96,
    "batch_size": 4,
    "micro_batch_size": 2,
    "steps": STEPS,
    "lr": 0.02,
    "warmup_steps": 2,
}


def functions() -> list[tuple[str, str]]:
    """Heads and bodies of short functions of Python's own library, which is the quickstart's
    text.
    """
    found = []
    for name in ("bisect", "heapq", "textwrap", "stat", "shlex", "queue"):
        lines = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text().splitlines()
        heads = (
            i
            for i, line in enumerate(lines)
            if line.lstrip().startswith("def ") and line.endswith(":")
        )
        found += [(lines[i].strip(), lines[i + 1].strip()) for i in heads]
    return [(head, body) for head, body in found if len(head) + len(body) < 60]


def write_lines(file: Path, instances: list) -> None:
    """Write instances as lines of JSON."""
    file.write_text("".join(json.dumps(instance) + "\n" for instance in instances))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Instances of both models, with a vocabulary that is made of them, and small models; each in a
    folder.
    """
    folder = tmp_path_factory.mktemp("live")
    bees = [
        {
            "head": escaped(head),
            "<ans>": {"body": escaped(body), "<mask_0>": "of <mask_1> é", "<mask_1>": "x"},
        }
        for head, body in functions()
    ]
    bees = [[bee, bees[i - 1]] if i % 4 == 0 else bee for i, bee in enumerate(bees)]
    ants = [
        {"text": f"{head}\n {body}", "task": ("lm", "mlm")[i % 2]}
        for i, (head, body) in enumerate(functions())
    ]
    for name, lines in (("bee", bees), ("ant", ants)):
        # Validation has the shortest instances, which fit into a row.
        (folder / f"{name}-val.jsonl").write_text(
            "".join(sorted((json.dumps(line) + "\n" for line in lines), key=len)[:6])
        )
        text, vocabulary = folder / f"{name}.jsonl", folder / f"{name}.txt"
        write_lines(text, lines)
        flags = [
            "--model",
            f"cpm-{name}",
            "--size",
            "200",
            "--input",
            str(text),
            "--output",
            str(vocabulary),
        ]
        make_vocabulary.main(flags)
        tokenizer = f"cpm-{'ant-greedy' if name == 'ant' else name}:{vocabulary}"
        # all of them fit into a row: a hash might choose only some that are too long
        val = sorted(lines, key=lambda line: len(json.dumps(line)))[:50:5]
        for part, chosen in (("train", [x for x in lines if x not in val]), ("val", val)):
            write_lines(folder / f"{name}-{part}.jsonl", chosen)
            prepare(
                "--input",
                folder / f"{name}-{part}.jsonl",
                "--tokenizer",
                tokenizer,
                "--output",
                folder / f"{name}-{part}",
            )
        (folder / f"{name}.json").write_text(
            json.dumps(changed(PRESETS[f"cpm-{name}-tiny"], **SHAPE).to_dict())
        )
    return folder


def options(folder, name, **more):
    return OPTIONS | {
        "model": folder / f"{name}.json",
        "data": folder / f"{name}-train/train",
        **more,
    }


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, list[tuple]]:
    """Losses and gradient norms of one process, of both models: what all other ways must
    reproduce.
    """
    found = {}
    for name in ("bee", "ant"):
        evaluated = {
            "val_data": folder / f"{name}-val/train",
            "eval_every": 3,
            "eval_sequences": 3,
            "save_every": 3,
        }
        said = train(folder, name, **options(folder, name, keep_last=9, **evaluated))
        assert " sequences an epoch, " in said
        counts = r"\d+ instances?(, \d+ longer than a row (is|are) (left out|cut))?"
        assert re.search(rf"sequences an epoch, {counts}; validation: {counts}\n", said)
        found[name] = curve(folder, name, "loss", "grad_norm")
    return found


def records(folder, name) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "processes", "more"),
    [
        ("bee", 2, {"sp_size": 2}),
        ("bee", 4, {"sp_size": 2, "layout": "striped", "strategy": "ulysses"}),
        ("ant", 4, {"sp_size": 4, "ulysses_size": 2}),
    ],
    ids=["bee-sp2", "bee-dp2xsp2-ulysses", "ant-usp"],
)
def test_losses_and_gradient_norms_do_not_depend_on_the_ranks(folder, whole, name, processes, more):
    """In fp32: sums in other orders, which the steps before have carried on."""
    output = f"{name}-{processes}-{'-'.join(map(str, more.values()))}"
    train(folder, output, processes=processes, **options(folder, name, **more))
    for mine, expected in zip(curve(folder, output, "loss", "grad_norm"), whole[name], strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


@BOTH
def test_the_run_learns_and_leaves_its_records(folder, whole, name):
    assert whole[name][-1][1] < whole[name][0][1] - 0.3
    found = records(folder, name)
    steps = [record for record in found if "loss" in record]
    assert all(
        r["instances"] >= 4 and r["targets"] > r["instances"] and r["balance"] == 1 for r in steps
    )
    assert [record["step"] for record in found if "val_loss" in record] == [3, 6]


@BOTH
def test_resuming_is_as_not_stopping(folder, whole, name):
    """Bit for bit, in the middle of an epoch: rows, answers in another order and hidden tokens are
    as they were.
    """
    output = f"{name}-resumed"
    train(folder, output, **options(folder, name, save_every=3, keep_last=9))
    checkpoint._remove(folder / output / "step_00000006")
    said = train(folder, output, resume="auto", **options(folder, name))
    assert "resumed after step 3" in said
    assert curve(folder, output, "loss", "grad_norm") == whole[name]
    said = train(folder, output, code=2, resume="auto", **options(folder, name) | {"seq_len": 120})
    assert "was reading other data: --seq-len 96 -> 120" in said
    other = {"bee": "ant", "ant": "bee"}[name]
    said = train(folder, output, code=2, resume="auto", **options(folder, other))
    assert "holds another model: " in said


@pytest.mark.skipif(not kernels.installed("bmtrain"), reason="needs the package bmtrain")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with GPUs test_gpu_train.py runs BMTrain as it is"
)
def test_bmtrain_gives_the_same(folder, whole, tmp_path):
    name = "bee"
    said = run_pretrain(
        2, tmp_path, command(folder, f"{name}-bmtrain", sp_size=2, **options(folder, name))
    )
    assert "BMTrainEngine" in said
    expected = [pytest.approx(row, rel=1e-5) for row in whole[name]]
    assert curve(folder, f"{name}-bmtrain", "loss", "grad_norm") == expected


def test_a_bee_fills_in_blanks(folder, whole, capsys):
    prompt = [
        {"head": "def f(x):", "<ans>": {"body": "", "<mask_0>": "of <mask_1>"}},
        {"head": "q<<", "<ans>": "x"},
    ]
    flags = [
        "--run",
        str(folder / "bee"),
        "--prompt",
        json.dumps(prompt),
        "--tokens",
        "6",
        "--temperature",
        "0",
    ]
    generate.main(flags)
    said = capsys.readouterr().out
    answer = json.loads(said)
    assert answer[1] == prompt[1]
    assert answer[0]["head"] == "def f(x):"
    assert list(answer[0]["<ans>"]) == ["body", "<mask_0>"]
    assert answer[0]["<ans>"]["<mask_0>"].startswith("of <mask_1>")
    generate.main(flags)
    assert capsys.readouterr().out == said
    for wrong, message in (
        ("text", "must be an instance as JSON"),
        ('{"a": "b"}', "there is nothing to fill in"),
    ):
        with pytest.raises(SystemExit):
            generate.main([*flags[:2], "--prompt", wrong])
        assert message in capsys.readouterr().err


def test_an_ant_continues_a_text(folder, whole, capsys):
    generate.main(
        ["--run", str(folder / "ant"), "--prompt", "def f(x", "--tokens", "12", "--seed", "1"]
    )
    said = capsys.readouterr().out
    assert said.startswith("def f(x")
    assert len(said) > len("def f(x\n")


@BOTH
def test_weights_go_to_cpm_lives_format_and_come_back(folder, whole, name, capsys):
    """A file of names and tensors, which the models load as they are, and a run that starts from
    them.
    """
    run, output = folder / name, folder / f"{name}-exported"
    with pytest.raises(SystemExit):
        export.main(["--run", str(run), "--output", str(output)])
    assert (
        f"a cpm-{name} has no Hugging Face format here: give --format bmtrain"
        in capsys.readouterr().err
    )
    export.main(
        ["--run", str(run), "--output", str(output), "--format", "bmtrain", "--dtype", "fp16"]
    )
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
    more = {
        "init_from": source,
        "val_data": folder / f"{name}-val/train",
        "eval_sequences": 3,
    }
    train(
        folder,
        f"{name}-from",
        **options(folder, name, **more) | {"steps": 1, "lr": 1e-30, "warmup_steps": 0},
    )
    losses = [records(folder, output)[-1]["val_loss"] for output in (name, f"{name}-from")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # weights were rounded to fp16


def test_the_commands_of_the_page_run_as_they_stand(tmp_path):
    """But for where their files are. The lines of data that it shows are read, too."""
    page = (ROOT / "docs/pretraining.md").read_text().split("\n## CPM-Bee and CPM-Ant\n")[1]
    shown = re.search(r"```json\n(.*?)```", page, re.DOTALL)[1]
    sums = [{"question": f"{i} + {j}", "<ans>": str(i + j)} for i in range(9) for j in range(9)]
    (tmp_path / "instances.jsonl").write_text(
        shown + "".join(json.dumps(line) + "\n" for line in sums)
    )
    commands = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].replace("\\\n", " ").splitlines()
    said = []
    for line in commands:
        there = re.sub(
            r"\b(instances\.jsonl|vocabulary\.txt|data/|runs/|exported/)", rf"{tmp_path}/\1", line
        )
        python, script, *arguments = shlex.split(there, comments=True)
        ranks = 2 if "--processes 2" in line else None
        code, output = run_script(ranks, script, *arguments)
        assert (python, code) == ("python", 0), output
        said.append(output)
    assert "data/bee/train: " in said[1] and "84 instances" in said[1]
    assert "bad lines" not in said[1]
    assert "1 data parallel x 2 sequence parallel ranks" in said[2]
    assert json.loads(said[3].splitlines()[-1])["question"] == "2 + 3"
    assert (tmp_path / "exported/bee/model.pt").is_file()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("bee", {"documents": "ignore"}, "--documents does not go with --model"),
        ("ant", {"window": 9}, "--window does not go with --model"),
        ("bee", {"seq_len": 20}, "no instance that fits into --seq-len 20"),
        (
            "bee",
            {"data": "ant-train/train"},
            "holds instances of cpm-ant, but this model reads instances of cpm-bee",
        ),
        (
            "bee",
            {"model": "cpm-tiny"},
            "holds instances of cpm-bee, but this model reads plain text",
        ),
    ],
)
def test_wrong_runs_are_refused(folder, name, more, message):
    more = {k: folder / v if k == "data" else v for k, v in more.items()}
    said = train(folder, "wrong", code=2, **options(folder, name) | more)
    assert message in said
    assert "Traceback" not in said
