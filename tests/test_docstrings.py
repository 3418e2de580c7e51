"""Docstrings begin with a verb or a noun, never in the middle of a thought."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
