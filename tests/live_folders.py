"""Folders of instances, and the vocabulary of the golden batch, for tests of CPM-Live's data."""

import json

import pytest

from tests.live import as_jsonl, write_vocabulary
from tests.preparing import prepare
from train.cpm_live.tokenizers import BeeTokenizer


@pytest.fixture
def golden_words(tmp_path) -> BeeTokenizer:
    """Token i of the golden batch's vocabulary as a character of its own."""
    return BeeTokenizer(
        write_vocabulary(tmp_path / "words.txt", *(chr(0x4E00 + i) for i in range(11, 120)))
    )


def written(*tokens) -> str:
    return "".join(t if isinstance(t, str) else " " if t == 5 else chr(0x4E00 + t) for t in tokens)


LINES = [
    {
        "head": f"def f{i}(x)",
        "file": {"name": "a.py", "of <mask_1>": "x <mask_0>"},
        "<ans>": {"body": "y" * (i % 7 + 1)},
    }
    for i in range(40)
]
LINES = [[line, LINES[i - 1]] if i % 5 == 0 else line for i, line in enumerate(LINES)]
LETTERS = sorted({c for c in json.dumps(LINES) if c not in ' <"'} | {"def"})


def prepare_lines(folder, lines, *options, model="cpm-bee", code=0) -> str:
    """Prepare lines of data in `folder`. Return the output."""
    vocabulary = write_vocabulary(folder.with_suffix(".txt"), *LETTERS, model=model)
    kind = "cpm-ant-greedy" if model == "cpm-ant" else model
    lines = as_jsonl(folder.with_suffix(".jsonl"), lines)
    inputs = ("--input", lines, "--tokenizer", f"{kind}:{vocabulary}", "--output", folder)
    return prepare(*inputs, *options, code=code)


@pytest.fixture(scope="module")
def bee_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bee") / "bee"
    prepare_lines(folder, LINES, "--val-fraction", 0.2)
    return folder


@pytest.fixture(scope="module")
def ant_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ant") / "ant"
    lines = [{"text": "def f(x)" * (i % 9 + 1), "task": ("lm", "mlm")[i % 2]} for i in range(30)]
    prepare_lines(folder, [*lines, {"text": "def y(x)\n" * 40}], model="cpm-ant")
    return folder
