"""The scripts of docs/migrate.md: what replaces those for other packages computes attention."""

import importlib.util
import os
import re

import pytest
import torch

from tests.launcher import GPUS, ROOT, run_script, torchrun

PAGE = (ROOT / "docs/migrate.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## From ")[1:])
SCRIPTS = {
    name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()
}
# Of q, k, v and dout, which are whole on every rank, what one process computes of them, in fp32.
ALONE = """
from tests.reference import relative_error
exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
inputs = (x.transpose(1, 2) for x in exact)
whole = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
whole.transpose(1, 2).backward(dout.float())
expected = [extract_local(x) for x in (whole.transpose(1, 2), *(x.grad for x in exact))]
for mine, alone in zip(found, expected, strict=True):
    assert mine.shape == alone.shape
    assert relative_error(mine, alone) < 1e-2  # of bf16, which has 8 bits
dist.barrier()
__import__("os")._exit(0)  # torch 2.13: a gloo thread may abort an interpreter that shuts down
"""
LOCAL = "found = [out, local_q.grad, local_k.grad, local_v.grad]"
FOUND = {  # what a script has computed, by what it is a script for
    "BurstAttention": LOCAL,
    "ring-flash-attention": (
        "assert lse.shape == (1, 4, 128) and lse.dtype == torch.float32\n"
        "q, k, v = qkv.unbind(2)\n"
        "found = [out, *local_qkv.grad.unbind(2)]"
    ),
    "yunchang": LOCAL,
    "torch context_parallel": (
        f"{LOCAL}\n"
        "found = [x.transpose(1, 2) for x in found]\n"
        "q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))\n"
        "from bmt_burst import shard\n"
        "extract_local = lambda x: shard(x, rank, size)"
    ),
}
BEFORE = {  # scripts for other packages, which the page's lines change
    "BurstAttention": "burst_attn.py",
    "ring-flash-attention": "ring_flash_attn.py",
    "yunchang": "yunchang.py",
}


def scripts_for(package):
    """A script before and after the changes that the page shows."""
    if package not in BEFORE:
        return SCRIPTS[package]
    before = after = (ROOT / "tests/fixtures/migrate" / BEFORE[package]).read_text()
    [diff] = re.findall(r"```diff\n(.*?)```", SECTIONS[package], re.DOTALL)
    removed, added = (re.findall(rf"^{re.escape(sign)}(.*\n)", diff, re.MULTILINE) for sign in "-+")
    for old, new in zip(removed, added, strict=True):
        assert after.count(old) == 1, old
        after = after.replace(old, new)
    return before, after


@pytest.mark.parametrize("package", BEFORE)
def test_the_lines_that_change_are_all_that_name_the_package(package):
    before, after = scripts_for(package)
    imports = rf"^(from|import) {BEFORE[package][:-3]}\b"
    assert re.search(imports, before, re.MULTILINE) and "bmt_burst" not in before
    assert not re.search(imports, after, re.MULTILINE)


def test_every_script_is_run():
    shown = {name: len(scripts) for name, scripts in SCRIPTS.items() if scripts}
    assert shown == dict.fromkeys(FOUND.keys() - BEFORE.keys(), 2)


def script_of(package, folder, after=True):
    """A script that compares what it computed with one process, and how many ranks it is for."""
    code = scripts_for(package)[after]
    script = folder / "script.py"
    script.write_text(f"{code}\n{FOUND[package]}\n{ALONE}")
    return script, int(re.search(r"--nproc-per-node (\d)", code)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs the scripts run on them")
@pytest.mark.parametrize("package", FOUND)
def test_the_changed_scripts_compute_what_one_process_does(package, tmp_path):
    script, ranks = script_of(package, tmp_path)
    code, printed = run_script(ranks, script)
    assert code == 0, printed


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 NVIDIA GPUs; this machine has {GPUS}")
@pytest.mark.parametrize(
    ("package", "after"),
    [*((x, True) for x in FOUND), ("BurstAttention", False), ("torch context_parallel", False)],
)
def test_scripts_compute_what_one_process_does_on_gpus(package, after, tmp_path):
    """Those that others' packages need not be installed for also before they change."""
    if not after and package == "BurstAttention" and importlib.util.find_spec("burst_attn") is None:
        pytest.skip("needs the package burst_attn")
    script, ranks = script_of(package, tmp_path, after)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = torchrun(min(ranks, GPUS // 2 * 2), script, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["transformers", "model_center"])
def test_examples_of_models_are_pointed_to(name):
    """Which tests/test_transformers.py and tests/test_model_center.py run."""
    there, here = (f"examples/{name}_{when}.py" for when in ("before", "after"))
    assert f"`diff {there} {here}`" in PAGE
    assert "bmt_burst.adapters" not in (ROOT / there).read_text()
    assert "enable(" in (ROOT / here).read_text()
