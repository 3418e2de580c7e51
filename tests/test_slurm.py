"""The job script of docs/slurm.md, with stand-ins for what Slurm has."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.preparing import write_tokens
from tests.test_readme import blocks
from train.data.tokenizer import ByteTokenizer
from train.settings.config import TrainConfig
from train.settings.options import read_values

PAGE = ROOT / "docs/slurm.md"
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
    scripts = blocks(PAGE, "bash")
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [options] = blocks(PAGE, "toml")
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
        ["bash", "-c", blocks(PAGE, "bash")[0]],
        env={**os.environ, **VARIABLES, **place},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 data parallel x 2 sequence parallel ranks" in done.stdout
    assert (tmp_path / "run/step_00000002/rank_00001.safetensors").is_file()
