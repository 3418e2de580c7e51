"""The package itself: what an import gives, and what type checkers find."""

import inspect
import os
import subprocess
import sys
from dataclasses import fields

import pytest

from bmt_burst import burst_attn_func
from bmt_burst.attention import Keywords
from bmt_burst.calls.softmax import SoftmaxAttention
from tests.launcher import ROOT


def test_one_import_gives_what_the_readme_names():
    program = (
        "import sys\n"
        "sys.modules['numpy'] = None\n"  # torch is the one hard dependency
        "import bmt_burst, torch\n"
        "q = torch.randn(1, 4, 2, 8)\n"
        "bmt_burst.simulate(2, lambda r: bmt_burst.burst_attn_func(q, q, q, process_group=r))\n"
        "bmt_burst.nn.BurstAttention, bmt_burst.loss.linear_cross_entropy_sum, "
        "bmt_burst.offload.Offload\n"
        "assert 'bmtrain' not in sys.modules and 'triton' not in sys.modules\n"
        "sys.modules['bmtrain'] = None\n"
        "assert not hasattr(bmt_burst, 'bmtrain') and not hasattr(bmt_burst, 'nothing')\n"
        "bmt_burst.bmtrain"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "AttributeError: bmt_burst.bmtrain cannot be imported" in done.stderr


def test_a_star_import_leaves_other_names_alone():
    names = {"nn": "torch's"}
    exec("from bmt_burst import *", names)
    assert names["nn"] == "torch's"
    assert names["burst_attn_func"] is burst_attn_func


def test_the_installed_package_declares_its_types(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / "bmt_burst/py.typed").exists()
    assert (tmp_path / "bmt_burst/kernels/reference.py").exists()


CALLS = """
import torch
from bmt_burst import Mask, burst_attn_func as attend, burst_attn_varlen_func as varlen
from bmt_burst import burst_attn_kvpacked_func as kv, burst_attn_qkvpacked_func as qkv
from bmt_burst import Cache
from bmt_burst.nn import Part

def as_part(cache: Cache) -> Part: return cache

x, either = torch.randn(1, 4, 2, 8), bool(input())
attend(x, x, x, return_lse=either), kv(x, x, return_lse=either), qkv(x, return_lse=either)
varlen(x, x, x, (0, 4), return_lse=either)
attend(x, x, x, 0.5, "auto", mask=Mask.causal(4), bias=None).sum()
attend(x, x, x, causal=True, return_lse=True)[1].sum()
kv(x, x, causal=True).sum(), qkv(x, layout="striped").sum(), varlen(x, x, x, (0, 4), window=2).sum()
attend(x, x, x, casual=True)  # wrong
attend(x, x, x, mask=3)  # wrong
attend(x, x, x, "auto")  # wrong
attend(x, x, x, 0.5, "auto", "causal")  # wrong
kv(x, x, casual=True)  # wrong
qkv(x, mask=3)  # wrong
varlen(x, x, x, (0, 4), mask=Mask.causal(4))  # wrong
varlen(x, x, x, (0, 4), (0, 4))  # wrong
"""


def test_a_type_checker_finds_wrong_arguments(tmp_path):
    """Without torch's own types, which take it 10 s to read."""
    api = pytest.importorskip("mypy.api")
    file, config = tmp_path / "calls.py", tmp_path / "mypy.ini"
    file.write_text(CALLS)
    config.write_text(
        f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n"
        "[mypy-torch.*]\nfollow_imports = skip\n"
    )
    printed, failed, _ = api.run(
        ["--config-file", str(config), "--cache-dir", os.devnull, str(file)]
    )
    assert not failed, failed
    found = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line}
    wrong = {n for n, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, printed


def test_options_are_those_of_the_signatures():
    """A new option stands in the signature, in the kind and in the keywords of packed variants."""
    shown = inspect.signature(burst_attn_func).parameters
    assert set(shown) - {"q", "k", "v"} == set(Keywords.__annotations__)
    tensors_and_groups = {"q", "k", "v", "sinks", "process_group", "double_group"}
    others = {"scores", "bias", "sparse", "choose_by", "mask", "causal", "layout", "kv_layout"}
    flags = {"optimize_bwd_comm", "return_lse"}
    kind = {field.name for field in fields(SoftmaxAttention)} - {"window", "extension"}
    found = {name.removeprefix("softmax_") for name in shown}
    assert found - tensors_and_groups - others - flags == kind
