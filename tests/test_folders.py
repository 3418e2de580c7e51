"""The folders of bmt_burst/ are its architecture: no circle of imports, and no import of a folder
above.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.launcher import ROOT

# From the lowest up; folders of one line may import each other.
LEVELS = [
    ("base", "errors"),
    ("sequence", "spec"),
    ("merging",),
    ("kernels",),
    ("transport",),
    ("ranks",),
    ("strategies",),
    ("calls",),
    ("bias", "sparse", "scores"),
    ("extensions",),
    ("attention", "loss", "offload", "nn", "", "doctor"),
    ("adapters", "bmtrain", "compat"),
]
# The terms that an extension adds to scores are compiled into the Triton kernels.
SEAM = ("kernels.triton_blocks", "bias.kernels.triton_terms")
# The core, and words of its extensions.
CORE = ("sequence", "merging", "transport", "ranks", "strategies")
WORDS = re.compile(r"\b(?i:bias|learned|sparse|selected)\b|\bScores\b")


def modules() -> dict[str, Path]:
    root = ROOT / "bmt_burst"
    names = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imported(name: str) -> Iterator[tuple[str, bool]]:
    """Yield what a module imports of the package, and whether it does when it is imported
    itself.
    """
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    tree = ast.parse(path.read_text())
    late = {id(x) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for x in ast.walk(f)}
    late |= {
        id(x)
        for f in ast.walk(tree)
        if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.dump(f.test)
        for x in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (
                node.module.split(".") if node.module else []
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bmt_burst":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            deeper = ".".join([*base, alias.name])
            yield (deeper if deeper in MODULES else ".".join(base)), id(node) not in late


def level(name: str) -> int:
    top = name.split(".")[0]
    return next(i for i, folders in enumerate(LEVELS) if top in folders)


def test_no_folder_imports_one_above():
    upwards = {
        (name, target)
        for name in MODULES
        for target, is_early in imported(name)
        if is_early and level(target) > level(name)
    }
    assert upwards == {SEAM}


def test_the_core_knows_no_extension():
    """No import of one, and no word."""
    for name, path in MODULES.items():
        if name.split(".")[0] in CORE:
            found = WORDS.findall(path.read_text())
            assert not found, f"{name} has {found}"
            extensions = {target for target, _ in imported(name) if level(target) == level("bias")}
            assert not extensions, f"{name} imports {extensions}"


def test_no_circle_of_imports():
    """Not between folders and not between modules, imports inside functions included."""
    circle = find_circle({name: {target for target, _ in imported(name)} for name in MODULES})
    assert not circle, " -> ".join(circle)


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


def imports_of_train() -> dict[str, set[str]]:
    """Return the modules of train/ that each of them imports, also in functions and for types."""
    paths = sorted((ROOT / "train").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    imports: dict[str, set[str]] = {name: set() for name in names}
    for name, path in zip(names, paths, strict=True):
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names} & imports.keys()
            elif isinstance(node, ast.ImportFrom):
                above = ".".join(package.split(".")[: 1 - node.level or None])
                base = ".".join(filter(None, [above if node.level else "", node.module or ""]))
                for alias in node.names:
                    deeper = f"{base}.{alias.name}"
                    imports[name] |= {deeper if deeper in imports else base} & imports.keys()
    return imports


def test_no_circle_of_imports_in_train():
    imports = imports_of_train()
    assert "train.data.folder" in imports["train.data.batches"]
    assert "train.engine.common" in imports["train.engine.torch"]
    circle = find_circle(imports)
    assert not circle, " -> ".join(circle)


# From the lowest up. Scripts are above all folders.
TRAIN_LEVELS = [
    "registry",
    "base",
    "data",
    "generation",
    "cpm_live",
    "engine",
    "checkpoints",
    "evaluation",
    "run",
    "planning",
]
SCRIPTS = {"make_vocabulary", "prepare_data", "pretrain", "generate", "export", "evaluate", "plan"}


def _train_level(name: str) -> int:
    top = name.split(".")[1]
    return len(TRAIN_LEVELS) if top in SCRIPTS else TRAIN_LEVELS.index(top)


def test_no_folder_of_train_imports_one_above():
    """So arrows between folders go one way, also those of imports in functions and for types."""
    imports = imports_of_train()
    modules = {name for name in imports if "." in name and not name.startswith("train.examples")}
    assert {_train_level(name) for name in modules} == set(range(len(TRAIN_LEVELS) + 1))
    upwards = {
        (name, target)
        for name in modules
        for target in imports[name] - {"train"}
        if _train_level(target) > _train_level(name)
    }
    assert not upwards
