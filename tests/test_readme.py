"""What the README shows works."""

import json
import re
import subprocess
import sys

import pytest
import torch

from bench.report import DOCS, MARKED, RESULTS, known, page, with_tables
from tests.helpers import ROOT


def test_the_simulated_example_prints_rounding():
    [code] = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = []
    names = {"print": printed.append}
    exec(code, names)
    [difference] = printed
    assert isinstance(difference, torch.Tensor)
    assert 0 <= difference < 1e-5
    x = names["x"].requires_grad_()
    [grad] = torch.autograd.grad(names["burst_attn_func"](x, x, x, causal=True).sin().sum(), x)
    names["unshard"](names["simulate"](3, names["work"])).sin().sum().backward()
    assert (x.grad - grad).abs().max() < 1e-4 * grad.abs().max()


def test_its_tables_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    assert with_tables(text) == text
    assert len(MARKED.findall(text)) == text.count("<!-- results:") == text.count("<!-- end") > 0


def test_the_page_of_results_is_what_the_results_say():
    text = (DOCS / "results.md").read_text()
    assert page() == text, "python bench/report.py --readme writes it anew"
    for folder, written in ((DOCS, text), (ROOT, (ROOT / "README.md").read_text())):
        assert all((folder / plot).read_text().count("<svg") == 1 for plot in re.findall(r"!\[.*?\]\((.*?)\)", written))
    with pytest.raises(ValueError, match=r"guessed-8\.jsonl begins with none of"):
        known(RESULTS / "guessed-8.jsonl")


def test_every_file_it_names_is_there():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("bmt_burst/            the library") : text.index("A layout, kernel, transport")]
    folder = ""
    for line in tree.splitlines():
        if line.startswith("`"):
            break
        names = re.findall(r"[\w/]+\.(?:py|sh)|^ *\w+/", line)
        folder = "" if not line.startswith(" ") else "bmt_burst/"
        base = names[0] if names and names[0].endswith("/") and not folder else ""
        for name in names:
            path = name.strip() if name.strip() == base else folder + base + name.strip()
            assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_the_commands_of_pretraining_run_as_they_stand(tmp_path):
    """From a file and a folder of text to a sample and a Hugging Face folder; TensorBoard, which never ends, aside."""
    section = (ROOT / "README.md").read_text().split("## Pretraining\n")[1].split("\n## ")[0]
    [commands] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = commands.replace("\\\n", " ").splitlines()
    assert [line.split()[:2] for line in lines] == [
        *(["python", f"train/{name}.py"] for name in ("prepare_data", "pretrain", "generate", "export")),
        ["tensorboard", "--logdir"],
    ]
    texts = [f"Once there were {i} rings, and {i * i} hops. " * 20 for i in range(300)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "more_text").mkdir()
    (tmp_path / "more_text/a.txt").write_text(texts[0])
    (tmp_path / "train").symlink_to(ROOT / "train")
    said = {}
    for line in lines[:-1]:
        done = subprocess.run(
            ["bash", "-c", line.replace("python ", f"{sys.executable} ", 1)],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, line + done.stdout + done.stderr
        said[line.split()[1]] = done.stdout
    assert "2 data parallel x 2 sequence parallel ranks" in said["train/pretrain.py"]
    assert said["train/generate.py"].startswith("Once")
    assert (tmp_path / "runs/mine/loss.png").is_file()
    assert list((tmp_path / "runs/mine").glob("tensorboard/events.*"))
    assert list((tmp_path / "exported").glob("*.safetensors"))
