"""The package itself: its imports, names, errors, docstrings and types."""

import ast
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest

import bmt_burst
from bmt_burst import burst_attn_func, errors
from bmt_burst.attention import Keywords
from bmt_burst.calls.softmax import SoftmaxAttention
from tests.launcher import ROOT
from tests.test_readme import PAGES


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


BUILTINS = {
    errors.RanksDisagree: (ValueError,),
    errors.RankFailed: (RuntimeError,),
    errors.RankGone: (RuntimeError,),
    errors.RankLate: (errors.RankGone, RuntimeError, TimeoutError),
}


def test_every_error_subclasses_a_builtin_one():
    assert {x.__name__ for x in BUILTINS} == set(errors.__all__)
    for error, builtins in BUILTINS.items():
        assert issubclass(error, builtins)
        assert sum(issubclass(error, kind) for kind in (ValueError, RuntimeError)) == 1


def test_errors_survive_the_way_between_processes():
    for error in BUILTINS:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copied = pickle.loads(pickle.dumps(error("rank 1, in call 2"), protocol))
            assert (type(copied), str(copied)) == (error, "rank 1, in call 2")


# Each name that no page has, and the reason.
EXCEPTIONS = {
    "base.autograd.check_first_derivative": "blocks are differentiable once, like calls",
    "base.compiled.fused_on_gpus": "passes of CPM-Live, which the library's own switch compiles",
    "base.compiled.not_compiled": "tiles compute again in the backward, as the library's calls",
    "base.policies.without_policies": "tiles compute again in the backward, as the library's calls",
    "bias.call_bias.CallBias": "decoding with a learned bias has a cache of its own",
    "bias.call_bias.SegmentIds": "decoding with a learned bias has a cache of its own",
    "fused.find_passes": "products of blocks are fused with the library's passes",
    "memories.protocol.reserve_memory": "decoding with a learned bias has a cache of its own",
    "sequence.span.merged": "segments of CPM-Live are joined as spans of masks are",
}


def find_public() -> set[str]:
    """Return the names of the library that pages have, with their modules."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = set(re.findall(r"bmt_burst(?:\.\w+)+", text))
    for module, names in re.findall(r"from (bmt_burst[\w.]*) import (\([^)]*\)|.*)", text):
        found |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    return found | {f"bmt_burst.{name}" for name in bmt_burst.__all__}


def find_modules() -> set[str]:
    """Return the modules whose public names are all on the API page."""
    return set(re.findall(r"^::: (bmt_burst[\w.]*)$", (ROOT / "docs/api.md").read_text(), re.M))


def find_imports() -> dict[str, set[str]]:
    """Return the names that train/ and models/ import, each with the files that do."""
    found = {}
    for path in [file for top in ("train", "models") for file in (ROOT / top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bmt_burst"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_the_application_imports_public_names():
    public, modules = find_public(), find_modules()
    private = {
        name.removeprefix("bmt_burst."): files
        for name, files in find_imports().items()
        if name not in public and name.rpartition(".")[0] not in modules
    }
    assert private.keys() == EXCEPTIONS.keys(), private
    assert len(EXCEPTIONS) <= 10


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("bmt_burst", "models", "train", "bench", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
NEVER = {"what", "of", "that", "those", "as", "which", "who", "where", "how"}
# A function does something: its docstring begins with a verb, and so with none of these.
NOUNS_BEGIN = {"the", "a", "an", "this", "these", "all", "each", "every", "no", "one", "its"}


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        is_documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if is_documented and (docstring := ast.get_docstring(node)):
            yield node, docstring


def _is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(getattr(x, "id", getattr(x, "attr", "")).endswith("property") for x in decorators)


def faults(source: str) -> list[str]:
    """Return the docstrings of `source` that begin with a wrong word, with their lines."""
    found = []
    for node, docstring in _docstrings(ast.parse(source)):
        first = docstring.split()[0].strip("`,.:").lower()
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        wrong = NEVER | NOUNS_BEGIN if is_function and not _is_property(node) else NEVER
        if first in wrong:
            found.append(f"line {getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]}")
    return found


def test_a_docstring_begins_with_a_verb_or_a_noun():
    found = {path: faults((ROOT / path).read_text()) for path in FILES}
    assert not {path: wrong for path, wrong in found.items() if wrong}


def test_the_lint_finds_faults():
    function = 'def f():\n    """{}"""\n'
    assert faults(function.format("The sum of x.")) and faults('"""Of which x is one."""')
    assert faults("class A:\n    " + '"""What x is."""') and not faults('"""The sums of x."""')
    assert not faults(function.format("Return the sum of x."))
    assert not faults("@property\n" + function.format("The sum of x."))
