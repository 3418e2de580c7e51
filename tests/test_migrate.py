"""The scripts of docs/migrate.md: those for other packages become ours by their imports, and compute attention."""

import os
import re

import pytest
import torch

from tests.helpers import GPUS, ROOT, run_script, torchrun
from tests.test_readme import blocks

PAGE = ROOT / "docs/migrate.md"
SCRIPTS = [code for code in blocks(PAGE, "python") if code.startswith("# torchrun")]
# Of q, k, v and dout, which are whole on every rank, what one process computes of them, in fp32.
ALONE = """
from tests.helpers import relative_error
exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
whole = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in exact), is_causal=True)
whole.transpose(1, 2).backward(dout.float())
expected = [extract_local(x) for x in (whole.transpose(1, 2), *(x.grad for x in exact))]
for mine, alone in zip(found, expected, strict=True):
    assert mine.shape == alone.shape
    assert relative_error(mine, alone) < 1e-2  # of bf16, which has 8 bits
dist.barrier()
__import__("os")._exit(0)  # torch 2.13: a gloo thread may abort an interpreter that shuts down
"""
FOUND = {
    "ring_flash_attn": (
        "assert lse.shape == (1, 4, 128) and lse.dtype == torch.float32\n"
        "q, k, v = qkv.unbind(2)\n"
        "found = [out, *local_qkv.grad.unbind(2)]"
    ),
    "yunchang": "found = [out, local_q.grad, local_k.grad, local_v.grad]",
}


@pytest.mark.parametrize("package", FOUND)
def test_scripts_of_other_packages_change_their_imports_alone(package):
    before, after = (code for code in SCRIPTS if f"{package} import" in code)
    assert after == re.sub(rf"^from {package}\b", f"from bmt_burst.compat.{package}", before, flags=re.MULTILINE)
    assert "bmt_burst" not in before


def script_of(package, folder):
    """The script that has our import, and compares what it computed with one process."""
    [code] = [code for code in SCRIPTS if f"from bmt_burst.compat.{package} import" in code]
    script = folder / "script.py"
    script.write_text(f"{code}\n{FOUND[package]}\n{ALONE}")
    return script, int(re.search(r"--nproc-per-node (\d)", code)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs the scripts run on them")
@pytest.mark.parametrize("package", FOUND)
def test_the_changed_scripts_compute_what_one_process_does(package, tmp_path):
    script, ranks = script_of(package, tmp_path)
    code, said = run_script(ranks, script)
    assert code == 0, said


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 NVIDIA GPUs; this machine has {GPUS}")
@pytest.mark.parametrize("package", FOUND)
def test_the_changed_scripts_compute_what_one_process_does_on_gpus(package, tmp_path):
    script, ranks = script_of(package, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = torchrun(min(ranks, GPUS // 2 * 2), script, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
