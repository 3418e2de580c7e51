"""Messages that docs/troubleshooting.md explains are those of the code."""

import ast
import re

from tests.launcher import ROOT
from train.base.ranks import LOST_CONTACT
from train.base.signals import INTERRUPTED
from train.run.watchdog import EXIT_CODE

PAGE = (ROOT / "docs/troubleshooting.md").read_text()


def strings_of_the_code() -> set[str]:
    """Return the code's texts, with "..." for each value that is filled in."""
    found = set()
    for folder in ("bmt_burst", "models", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [x.value if isinstance(x, ast.Constant) else "..." for x in node.values]
                    found.add("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def test_every_message_stands_in_the_code():
    messages = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
    assert len(messages) == 10
    code = strings_of_the_code()
    assert not [x for x in messages if not any(x in text for text in code)]


def test_exit_codes_are_those_of_the_code():
    codes = re.findall(r"^\| (\d+) \| (.*) \|", PAGE, re.MULTILINE)
    assert dict(codes)[str(EXIT_CODE)].startswith("hung")
    assert dict(codes)[str(LOST_CONTACT)].startswith("lost")
    assert dict(codes)[str(INTERRUPTED)].startswith("was ended at once")
