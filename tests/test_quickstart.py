"""The quickstart's script installs once and trains. Its Python here only notes its arguments."""

import shutil
import subprocess
import sys

import pytest

from tests.launcher import ROOT

PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *device_count*) echo "$GPUS" ;;
    "-c import torch") exit 0 ;;
    -c*|-) exec {sys.executable} "$@" ;;
    "-m pip "*) echo "$@, from ${{PIP_FIND_LINKS:-the index}}" >>asked; exit "$PIP_FAILS" ;;
    *) echo "$@" >>asked ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script in a repository with made-up `.venv` and tools. It
    returns the ended process and its log.
    """
    train, tools = tmp_path / "repository/train", tmp_path / "tools"
    train.mkdir(parents=True), tools.mkdir()
    for name in ("quickstart.sh", "venv.sh", "pip.sh"):
        shutil.copy(ROOT / "train" / name, train)
    shutil.copy(ROOT / "pyproject.toml", train.parent)
    (train / "install_gpu.sh").write_text(
        '. train/pip.sh; echo install_gpu.sh >>asked; touch "$(stamp train)"'
    )
    (train.parent / ".venv/bin").mkdir(parents=True)
    (train.parent / ".venv/bin/activate").write_text("")

    def run(*arguments, gpus=0, nvcc=True, pip_fails=False):
        programs = {
            "python": PYTHON,
            "python3": PYTHON,
            "nvidia-smi": f'[ {gpus} = 0 ] || echo "GPU 0: one"\n',
        }
        programs |= {"nvcc": "exit 0\n"} if nvcc else {}
        for name, code in programs.items():
            (tools / name).write_text(code)
            (tools / name).chmod(0o755)
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "GPUS": str(gpus)}
        environment |= {"PIP_FAILS": str(int(pip_fails))}
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
        command = ["bash", train / "quickstart.sh", *arguments]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, **options)
        log = train.parent / "asked"
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def installs(asked):
    return [line for line in asked if line.startswith("-m pip") or line == "install_gpu.sh"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "dtype"), [(0, 2, "fp32"), (1, 1, "bf16"), (8, 4, "bf16")]
)
def test_ranks_are_the_gpus(start, gpus, ranks, dtype):
    done, asked = start(gpus=gpus)
    assert done.returncode == 0, done.stderr
    [training] = [line for line in asked if line.startswith("train/pretrain.py ")]
    assert f" --processes {ranks} --sp-size {ranks} " in training
    assert f" --dtype {dtype} " in training


def test_nothing_is_installed_twice(start):
    for gpus in (2, 0, 2):  # install_gpu.sh installs, and then there is nothing to install anywhere
        _, asked = start(gpus=gpus)
    assert installs(asked) == ["install_gpu.sh"]


def test_without_gpus_pip_installs_once_and_reports_the_amount(start):
    done, asked = start()
    assert "100 MB" in done.stdout
    assert "This takes one to ten minutes" in done.stdout
    again, asked_again = start()
    assert "installing" not in again.stdout
    assert len(installs(asked)) == len(installs(asked_again)) == 1
    assert "--editable .[train]" in installs(asked)[0]


def test_without_nvcc_training_is_torchs(start):
    done, asked = start(gpus=2, nvcc=False)
    assert "training will use torch's FSDP2" in done.stdout
    assert "install_gpu.sh" not in asked


def test_a_folder_stands_for_the_index(start, tmp_path):
    (tmp_path / "my wheels").mkdir()
    _, asked = start("--from", "my wheels")
    assert installs(asked)[0].endswith(f", from {(tmp_path / 'my wheels').as_uri()}")


def test_a_missing_network_is_explained(start):
    for arguments, reason in (
        ((), "needs a network, or a folder of wheels"),
        (("--from", "."), "pip only looked in 'file:///"),
    ):
        done, asked = start(*arguments, pip_fails=True)
        assert done.returncode == 1
        assert reason in done.stderr and "pip download --dest FOLDER" in done.stderr
        assert not any("pretrain.py" in line for line in asked)


def test_other_arguments_are_refused(start):
    for arguments in (("--from",), ("--from", "nowhere"), ("--fro", ".")):
        done, asked = start(*arguments)
        assert done.returncode == 2
        assert "--from" in done.stderr and not asked
