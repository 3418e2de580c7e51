"""What the README shows works."""

import re

import torch

from bench.report import MARKED, with_tables
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
