"""The configuration of a run: files, the command line, models and learning rates."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from models.config import CPMConfig
from models.rope import Linear
from tests.refusals import refused_line
from train.base.command_line import read_total
from train.loop.progress import learning_rate
from train.loop.stages import parse_run
from train.settings.config import TrainConfig, remark_length
from train.settings.facts import ALL_STAGES, HOST, ONE_STAGE, PATH, REPLACES
from train.settings.options import parse_options
from train.settings.settings import COMPONENTS, FACTS


def test_configuration_comes_from_defaults_file_and_command_line(tmp_path):
    text = 'seq_len = 64\nchunk = "1K"\nlr = 1\nval_data = "v"\ndeterministic = true\n'
    (tmp_path / "run.toml").write_text(text + '[rope_scaling]\nkind = "linear"\nfactor = 2\n')
    flags = ["--config", str(tmp_path / "run.toml"), "--seq-len", "128", "--no-deterministic"]
    config, _ = parse_run(flags)
    assert (config.seq_len, config.chunk, config.lr) == (128, 1024, 1.0)
    assert (config.val_data, config.deterministic) == ("v", False)
    assert config.model_config().rope_scaling == Linear(2)
    again, _ = parse_run(["--rope-scaling", '{"kind": "linear", "factor": 2}'])
    assert again.model_config() == config.model_config()
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    assert parse_run(["--config", str(tmp_path / "run.json")]) == (config, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-len 0", "--seq-len must be at least 1, got 0"),
        ("--schedule sgd", "invalid choice: 'sgd'"),
        ("--lr -1", "--lr must be positive"),
        ("--beta1 1.5", "--beta1 must be at least 0 and below 1, got 1.5"),
        ("--timeout 1e10", "--timeout must be at most 1e+08 seconds"),
        ("--config CUT", "cut.json: Expecting"),
        ("--config missing.toml", "No such file"),
        ("--config BAD", "unknown option 'sequence'"),
        ("--steps 10 --warmup-steps 6 --decay-steps 6", "--warmup-steps 6 and --decay-steps 6 are"),
        ("--min-lr-ratio 0", "--min-lr-ratio must be above 0 for --schedule wsd"),
        ("--min-lr-ratio nan", "--min-lr-ratio must be finite, got nan"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--stepz 1", "unrecognized arguments: --stepz 1"),
        (f"--seed {'9' * 20}", "--seed must be below 2^63"),
        ("--data ", "--data must not be empty"),
        ("--checkpointing-blocks 3", "needs --checkpointing selective or full"),
        ("--eval-sequences 0", "--eval-sequences must be at least 1"),
        ("--rope-scaling yarn", "argument --rope-scaling: 'yarn' is not JSON: Expecting value"),
        ("--rope-scaling [1]", "--rope-scaling: expected names and values in braces, got '[1]'"),
        ('--rope-scaling {"kind":"linear"}', "linear takes factor: missing ['factor']"),
        ("--sp-size 2 --seq-len 1", "--seq-len 1 is too short for 2 ranks; the smallest is 2"),
        ("--sp-size 4 --ulysses-size 3", "--ulysses-size 3 does not divide --sp-size 4"),
        ("--ulysses-size 1 --inner-size 1", "--inner-size and --ulysses-size both say which ranks"),
        ("--strategy ring --ulysses-size 1", "is for --strategy usp, got --strategy ring"),
        ("--strategy ulysses --sp-size 4 --inner-size 2", "ulysses takes all ranks as one"),
        (
            "--strategy plain-ring --sp-size 4 --inner-size 2",
            "--strategy plain-ring, --seq-len 512",
        ),
    ],
)
def test_wrong_configurations_are_refused(arguments, message, tmp_path, capsys):
    files = {"BAD": str(tmp_path / "bad.toml"), "CUT": str(tmp_path / "cut.json")}
    Path(files["BAD"]).write_text("sequence = 3\n")
    Path(files["CUT"]).write_text('{"lr": ')
    words = [files.get(word, word) for word in arguments.split(" ")]
    printed = refused_line(capsys, parse_run, *words)
    assert printed.startswith("pretrain.py: ") and message in printed


def test_options_that_spoil_a_model_are_named(tmp_path):
    scaling = {"kind": "yarn", "factor": 4.0, "original_length": 64}
    expected = r"--rope-theta, --rope-scaling with the default model cpm-tiny: .* 1, got 0\.5"
    with pytest.raises(ValueError, match=expected):
        TrainConfig(rope_theta=0.5, rope_scaling=scaling).model_config()
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"deep\.json: .*recursion"):
        TrainConfig(model=str(tmp_path / "deep.json")).model_config()


def test_a_length_is_compared_with_the_range_of_a_presets_rotary_positions():
    for name, seq_len, expected in (
        ("minicpm4-8b", 32768, None),
        ("minicpm4-8b", 2**20, "beyond the 32,768 tokens that its rotary positions (longrope)"),
        ("llama3.1-8b", 131072, None),
        ("cpm-tiny", 2**20, None),
    ):
        config = TrainConfig(model=name, seq_len=seq_len)
        remark = remark_length(config, config.model_config())
        assert remark is None if expected is None else expected in remark


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_run(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in TrainConfig.__dataclass_fields__)


def test_lengths_count_in_1024_and_totals_in_1000(capsys):
    for text, expected in (("131072", 131072), ("128K", 131072), ("1m", 2**20), ("1.5K", 1536)):
        _, given = parse_options(["--seq-len", text, "--chunk", text])
        assert given == {"seq_len": expected, "chunk": expected}
    for text, expected in (("10B", 1e10), ("1e11", 1e11), ("2.5T", 2.5e12), ("7", 7.0)):
        assert read_total(text) == expected
    for text in ("128X", "K", "1.0001K", "inf", ""):
        printed = refused_line(capsys, parse_options, "--seq-len", text)
        assert "argument --seq-len: expected a" in printed


@pytest.mark.parametrize(
    ("schedule", "middle"), [("wsd", 1.0), ("cosine", 0.01 + 0.99 * 0.5), ("linear", 1 - 0.99 / 2)]
)
def test_learning_rates(schedule, middle):
    config = TrainConfig(
        steps=110, warmup_steps=10, decay_steps=20, lr=2.0, schedule=schedule, min_lr_ratio=0.01
    )
    rates = [learning_rate(step, config) / 2.0 for step in range(1, 111)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx(middle)
    assert rates[109] == pytest.approx(0.01)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    if schedule == "wsd":
        assert rates[89] == 1.0
        assert rates[99] == pytest.approx(0.1)  # half way down an exponential


def test_each_setting_is_described_in_one_place():
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    assert [*FACTS] == fields
    assert len(set(fields)) == sum(len(dataclasses.fields(part)) for part in COMPONENTS.values())
    model = {field.name for field in dataclasses.fields(CPMConfig)}
    for name, facts in FACTS.items():
        assert REPLACES not in facts.scope or name in model
        assert ALL_STAGES | ONE_STAGE not in facts.scope
        assert HOST | PATH not in facts.scope
        facts.check_value(name, getattr(TrainConfig, name))


def test_model_from_a_file(tmp_path):
    from models.config import PRESETS

    (tmp_path / "m.json").write_text(json.dumps(PRESETS["cpm-tiny"].to_dict()))
    assert TrainConfig(model=str(tmp_path / "m.json")).model_config() == PRESETS["cpm-tiny"]
    (tmp_path / "m.json").write_text('{"vocab_size": 3, "depth": 4}')
    with pytest.raises(ValueError, match=r"missing \['hidden_size', .* unknown \['depth'\]"):
        TrainConfig(model=str(tmp_path / "m.json")).model_config()
    with pytest.raises(ValueError, match="neither a preset"):
        TrainConfig(model="cpm-huge").model_config()
