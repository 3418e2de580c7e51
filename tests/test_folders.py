"""The folders of bmt_burst/ and train/ are their architecture: no circle of imports, and no import
of a folder above.

Imports are read from the source: statements, calls of `import_module` with a literal name, and the
tables of registries. A computed name cannot be seen: only `base/registry.py` may import by one. The
table in a package's own `__init__.py` is not followed, because the implementations that it names
import their contract from there.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.launcher import ROOT

# From the lowest up; folders of one line may import each other.
BMT_BURST = [
    ("base", "errors"),
    ("sequence", "spec", "fused"),
    ("merging",),
    ("kernels",),
    ("transport",),
    ("ranks",),
    ("strategies",),
    ("calls",),
    ("memories",),
    ("blocks",),
    ("bias", "sparse", "lightning", "scores"),
    ("extensions",),
    ("attention", "parts", "loss", "folding", "offload", "nn", "", "doctor", "ahead", "planning"),
    ("adapters", "bmtrain", "compat"),
]
TRAIN = ["registry", "base", "data", "generation", "cpm_live", "engine", "checkpoints"]
TRAIN += ["evaluation", "settings", "run", "loop", "trained", "planning"]
SCRIPTS = ("make_vocabulary", "prepare_data", "pretrain", "generate", "export", "evaluate", "plan")
LEVELS = {"bmt_burst": BMT_BURST, "train": [("",), *((name,) for name in TRAIN), SCRIPTS]}
# The core, and words of its extensions.
CORE = ("sequence", "merging", "transport", "ranks", "strategies", "calls")
WORDS = re.compile(r"\b(?i:bias|learned|sparse|lightning|selected)\b|\bScores\b")


def modules(package: str) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = {package: modules(package) for package in ("bmt_burst", "train")}


@functools.cache
def imported(name: str) -> list[tuple[str, bool]]:
    """Return what a module imports of its package, and whether it does when imported itself."""
    known = MODULES[name.split(".")[0]]
    package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(known[name].read_text())
    late = {id(x) for f in ast.walk(tree) if _is_late(f) for x in ast.walk(f)}
    return [
        (target, id(node) not in late)
        for node in ast.walk(tree)
        for target in _find_targets(node, package, known)
        if target in known
    ]


def _find_targets(node: ast.AST, package: str, known: Collection[str]) -> list[str]:
    """Return the modules that a node of a module in `package` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _resolve("." * node.level + (node.module or ""), package)
        deeper = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in deeper]
    if _calls("import_module", node) and (name := _literal_name(node)):
        return [_resolve(name, package)]
    if _calls("Registry Modules", node) and ast.unparse(node.args[0]) == "__package__":
        places = ast.literal_eval(node.args[1]).values()
        return [_resolve("." + place.partition(":")[0], package) for place in places]
    return []


def _resolve(name: str, package: str) -> str:
    """Return the full name of a module that is imported as `name`, perhaps relative."""
    module = name.lstrip(".")
    above = package.split(".")[: 1 - (len(name) - len(module)) or None] if module != name else []
    return ".".join(filter(None, [*above, module]))


def _calls(names: str, node: ast.AST) -> bool:
    """Whether a node calls one of some functions, perhaps of a module."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in names.split()


def _literal_name(node: ast.Call) -> str | None:
    """Return the name that import_module is called with, or None if it is computed. A relative
    name must be relative to the module's own package.
    """
    name, *anchor = (ast.unparse(x) for x in [*node.args, *(x.value for x in node.keywords)])
    is_literal = name[0] in "'\"" and anchor in ([], ["__package__"])
    return ast.literal_eval(name) if is_literal else None


def _is_late(node: ast.AST) -> bool:
    """Whether imports inside happen later or never: in functions, and for types."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.FunctionDef)


def folder_of(name: str) -> str:
    """Return a module's folder, or its own name without one, or "" for the package itself."""
    return "".join(name.split(".")[1:2])


def level(name: str) -> int:
    levels = LEVELS[name.split(".")[0]]
    found = [i for i, folders in enumerate(levels) if folder_of(name) in folders]
    assert found, f"add {folder_of(name)!r} to LEVELS in tests/test_folders.py"
    return found[0]


@pytest.mark.parametrize("package", MODULES)
def test_no_folder_imports_one_above(package):
    """In `train` not in functions and for types either."""
    names = MODULES[package]
    assert {level(name) for name in names} == set(range(len(LEVELS[package])))
    upwards = {
        (name, target)
        for name in names
        for target, is_early in imported(name)
        if (is_early or package == "train") and level(target) > level(name)
    }
    assert not upwards


def test_the_core_knows_no_extension():
    """No import of one, and no word."""
    extension = level("bmt_burst.bias")
    for name, path in MODULES["bmt_burst"].items():
        if folder_of(name) in CORE:
            found = WORDS.findall(path.read_text())
            assert not found, f"{name} has {found}"
            extensions = {target for target, _ in imported(name) if level(target) == extension}
            assert not extensions, f"{name} imports {extensions}"


@pytest.mark.parametrize("package", MODULES)
def test_no_circle_of_imports(package):
    """Not between folders and not between modules, imports inside functions included."""
    imports = {name: {target for target, _ in imported(name)} for name in MODULES[package]}
    circle = find_circle(imports)
    assert not circle, " -> ".join(circle)


def test_only_registries_import_by_a_computed_name():
    """Besides `ahead`, which imports the modules of kernels in other processes. And a registry
    outside of an `__init__.py` says `__package__`, which this test follows.
    """
    computed = set()
    for name, path in MODULES["bmt_burst"].items():
        for node in ast.walk(ast.parse(path.read_text())):
            if _calls("import_module", node) and _literal_name(node) is None:
                computed.add(name)
            if _calls("Registry Modules", node):
                anchor = "__name__" if path.name == "__init__.py" else "__package__"
                assert ast.unparse(node.args[0]) == anchor, name
    assert computed == {"bmt_burst.ahead", "bmt_burst.base.registry"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", ["a.b"]),
        ("from ..c import d", ["a.c"]),
        ("from .c import d", ["a.b.c.d"]),
        ("from . import c", ["a.b.c"]),
        ("importlib.import_module('.c', __package__)", ["a.b.c"]),
        ("import_module('..c', package=__package__)", ["a.c"]),
        ("import_module('a.c')", ["a.c"]),
        ("import_module(f'a.{name}')", []),
        ("Modules(__package__, {'x': 'c', 'y': 'c.d:Kind'})", ["a.b.c", "a.b.c.d"]),
        ("Registry(__name__, {'x': 'c'})", []),
    ],
)
def test_imports_are_found(source, expected):
    """Imports of a module in the package a.b."""
    nodes = ast.walk(ast.parse(source))
    known = {"a.b.c", "a.b.c.d", "a.c"}
    assert [x for node in nodes for x in _find_targets(node, "a.b", known)] == expected


def test_a_folder_without_a_level_is_named():
    with pytest.raises(AssertionError, match="add 'attic' to LEVELS"):
        level("bmt_burst.attic.box")


def test_circles_are_found():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle, the first again as the last, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(imports[name] - {name}):
            if circle := visit(target, [*path, name]):
                return circle
        done.add(name)
        return []

    for name in imports:
        if circle := visit(name, []):
            return circle
    return []
