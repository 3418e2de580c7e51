"""The application imports only names of the library that a page of the documentation has."""

import ast
import re

import bmt_burst
from tests.launcher import ROOT
from tests.test_readme import PAGES

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
