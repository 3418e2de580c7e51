"""What docs/design.md says is so: its plan, its rule of order, its names.
`python -m tests.test_design` prints anew.
"""

import ast
import contextlib
import importlib
import io
import re

import bmt_burst
from tests.launcher import ROOT

PAGE = ROOT / "docs/design.md"
_PRINTED = re.compile(r"(```python\n(.*?)```\n\n<!-- printed -->\n```\n).*?(```\n)", re.DOTALL)


def with_printed(text: str) -> str:
    """A page with what its code prints, where that is marked."""

    def printed(match: re.Match) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(match[2], {})
        return match[1] + output.getvalue() + match[3]

    return _PRINTED.sub(printed, text)


def test_the_plan_it_shows_is_what_the_code_prints():
    text = PAGE.read_text()
    assert len(_PRINTED.findall(text)) == text.count("<!-- printed -->") == 1
    assert with_printed(text) == text, "python -m tests.test_design prints it anew"


def test_examples_in_docstrings_print_something(capsys):
    """With the package's public names and those of the module itself."""
    tried = 0
    for path in (ROOT / "bmt_burst").rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"Try\s`(.+?)`\.", docstring):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            exec(line, {**vars(bmt_burst), **vars(importlib.import_module(module))})
            assert capsys.readouterr().out.strip(), line
            tried += 1
    assert tried > 3


def test_every_file_it_names_is_there():
    names = set(re.findall(r"`([\w/]+\.(?:py|sh|md))`", PAGE.read_text()))
    assert len(names) > 20
    folders = [
        ROOT,
        *(
            ROOT / "bmt_burst" / folder
            for folder in ("", "kernels", "strategies", "strategies/ring")
        ),
    ]
    for name in names:
        assert any((folder / name).is_file() for folder in folders), name


def test_every_name_it_uses_is_in_the_code():
    paths = [path for part in ("bmt_burst", "tests") for path in (ROOT / part).rglob("*.py")]
    code = "\n".join(path.read_text() for path in paths)
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    names = {
        name
        for quoted in re.findall(r"`([^`]+)`", prose)
        for name in re.findall(r"[A-Za-z_]\w+", quoted)
    }
    files = {
        name for path in paths for part in path.relative_to(ROOT).parts for name in part.split(".")
    }
    words = set(re.findall(r"\w+", code))
    assert len(names) > 60
    assert names - files <= words


if __name__ == "__main__":
    PAGE.write_text(with_printed(PAGE.read_text()))
