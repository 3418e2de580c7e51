"""The application imports only names of the library that a page of the documentation has."""

import ast
import re

import bmt_burst
from tests.launcher import ROOT
from tests.test_readme import PAGES

# Each file with names that no page has, and the reason.
EXCEPTIONS = {
    "models/cpm.py": (
        "it checks as the library's layers do, and tells all ranks",
        {"base.arguments.as_int", "base.autocast.autocast_dtype"}
        | {"calls.refusal.CALL", "ranks.agreement.refuse"},
    ),
    "models/linears.py": (
        "products that are fused with the library's passes",
        {"base.autograd.check_first_derivative", "fused.find_passes"},
    ),
    "models/tiled.py": (
        "a backward that computes again, as the library's",
        {"base.autograd.check_first_derivative", "base.compiled.not_compiled"}
        | {"base.dtypes.accumulator_dtype", "base.policies.without_policies"},
    ),
    "models/cpm_live/layers.py": (
        "passes of CPM-Live, which the library's own compiler switch compiles",
        {"base.compiled.fused_on_gpus"},
    ),
    "models/cpm_live/scores.py": (
        "segments, which are joined as spans of masks are",
        {"sequence.span.Span", "sequence.span.merged"},
    ),
    "train/generation/decoding.py": (
        "a cache of its own for models with a learned bias",
        {"bias.call_bias.CallBias", "bias.call_bias.SegmentIds"}
        | {"memories.protocol.reserve_memory"},
    ),
    "train/settings/config.py": (
        "whether a strategy takes a learned bias is asked before there are groups",
        {"bias.kernels.load", "bias.scoring.TableScoring"},
    ),
    "train/planning/attention.py": (
        "it runs plans of the library on tensors without values, to count their memory",
        {"base.dtypes.accumulator_dtype", "blocks.far.packed_dtype", "kernels.fa4.Fa4Kernel"}
        | {"ranks.rings.Rings", "sequence.layout.Chunked", "sequence.layout.count_chunks"}
        | {"strategies.Problem", "strategies.Sizes", "strategies.compute.Keys"}
        | {"strategies.compute.QueryGradients", "transport.ALONE"}
        | {"transport.imagined.ImaginedRing"},
    ),
    "train/planning/units.py": (
        "it runs memories of the library on tensors without values, to count their memory",
        {"calls.autograd.Past", "lightning.memory.Lightning", "memories.keys.KeyMemory"}
        | {"memories.protocol.Kind", "memories.protocol.Room", "memories.protocol.Turn"},
    ),
    "train/planning/lightning.py": (
        "it counts the memory of the library's kernels",
        {"lightning.triton_kernel.longest_piece", "transport.LANES"},
    ),
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
    private: dict[str, set[str]] = {}
    for name, files in find_imports().items():
        if name not in public and name.rpartition(".")[0] not in modules:
            for file in files:
                private.setdefault(file, set()).add(name.removeprefix("bmt_burst."))
    assert private == {file: names for file, (_, names) in EXCEPTIONS.items()}
    assert len(EXCEPTIONS) <= 10
