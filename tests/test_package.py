"""The package itself: what an import gives, and what type checkers find."""

import subprocess
import sys
from typing import get_overloads

from bmt_burst import burst_attn_func
from tests.helpers import ROOT


def test_one_import_gives_what_the_readme_names():
    program = (
        "import bmt_burst, sys\n"
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


def test_what_is_installed_says_that_it_has_types(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / "bmt_burst/py.typed").exists()
    assert (tmp_path / "bmt_burst/kernels/cpu.py").exists()


def test_its_overloads_say_what_return_lse_returns():
    overloads = [function.__annotations__ for function in get_overloads(burst_attn_func)]
    assert [(x["return_lse"], x["return"]) for x in overloads] == [
        ("Literal[True]", "tuple[Tensor, Tensor]"),
        ("Literal[False]", "Tensor"),
        ("bool", "Tensor | tuple[Tensor, Tensor]"),
    ]
    assert burst_attn_func.__annotations__["return"] == overloads[2]["return"]
