"""Rows that are cut from documents, with a begin token in front of each or without."""

import hashlib
import itertools

import numpy as np
import pytest

from bmt_burst import IGNORE_INDEX
from tests.preparing import edit_index, write_documents
from tests.test_documents import EOS, LENGTHS
from train.data import token_file
from train.data.folder import Sequences, TokenFile
from train.data.stored import StoredNumbers, TokenWriter
from train.data.tokenizer import ByteTokenizer
from train.settings.config import TrainConfig

BOS = 200  # a token that the documents below may begin with
MIXED = (
    [BOS, 1, 2],
    [3],
    [BOS],
    [4, BOS, BOS, 5, 6, 7, 8],
    [BOS, 9],
    [10, 11],
    [BOS, BOS, 12, 13, 14, 15, 16, 17],
)
TEXTS = {
    "none begin": [[document] * length for document, length in enumerate(LENGTHS)],
    "some begin": MIXED,
    "all begin": [[BOS, *document] for document in MIXED],
    "a single one": [[5, 6]],
}


def written(folder, documents) -> TokenFile:
    return TokenFile(write_documents(folder, map(np.array, documents)))


@pytest.fixture
def folder(tmp_path):
    return write_documents(tmp_path / "data", map(np.array, TEXTS["none begin"]))


def begun(documents: list[list[int]], bos: int | None) -> list[list[int]]:
    """Return documents with begin tokens, if there is one, and eos."""
    first = [] if bos is None else [bos]
    return [[*(first if document[0] != bos else []), *document, EOS] for document in documents]


def rows_by_hand(
    documents: list[list[int]], seq_len: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Return tokens, labels and documents of rows that are cut from documents token by token."""
    tokens = list(itertools.chain(*documents))
    starts = set(itertools.accumulate(map(len, documents), initial=0))
    rows = []
    for first in range(0, len(tokens) - 1, seq_len):
        places = range(first, min(first + seq_len, len(tokens) - 1))
        rest = seq_len - len(places)
        read = [tokens[place] for place in places]
        labels = [IGNORE_INDEX if x + 1 in starts else tokens[x + 1] for x in places]
        inside = [place - first for place in places if place in starts]
        bounds = sorted({0, *inside, len(places), seq_len})
        rows.append((read + [0] * rest, labels + [IGNORE_INDEX] * rest, bounds))
    return rows


@pytest.mark.parametrize("bos", [None, BOS, EOS])
@pytest.mark.parametrize("text", TEXTS)
def test_rows_are_cut_from_documents_which_may_have_a_begin_token_each(tmp_path, text, bos):
    """Rows have every length, so they are cut at every place."""
    file = written(tmp_path / "data", TEXTS[text])
    expected = begun(TEXTS[text], bos)
    tokens = sum(map(len, expected))
    for seq_len in range(1, tokens + 1):
        data = Sequences(file, seq_len, 0, documents=True, bos=bos)
        rows = [
            (row.tokens.tolist(), row.labels.tolist(), [*row.documents])
            for row in map(data.read, range(len(data)))
        ]
        assert rows == rows_by_hand(expected, seq_len)
        assert data.read(None).documents == (0, seq_len)


@pytest.mark.parametrize(
    ("text", "scanned"), [("none begin", False), ("all begin", False), ("some begin", True)]
)
def test_data_that_counts_begun_documents_is_not_searched(tmp_path, monkeypatch, text, scanned):
    """The index counts documents that start with the tokenizer's begin token, also in a part that
    is split off.
    """
    monkeypatch.setattr(ByteTokenizer, "bos_id", BOS)
    whole = written(tmp_path / "data", TEXTS[text])
    writer, part = (TokenWriter(tmp_path / x, ByteTokenizer()) for x in ("whole", "part"))
    for document in TEXTS[text]:
        writer.write([[], np.array(document[:1]), document[1:]])
    begun = sum(document[0] == BOS for document in TEXTS[text])
    assert writer.begun == whole.index["begun_documents"] == begun
    writer.close()
    monkeypatch.setattr("train.data.stored._COPIED", 3)
    part.copy(writer, 0, writer.tokens)
    assert (part.begun, part.tokens, part.documents) == (begun, writer.tokens, writer.documents)
    read, plain = [], StoredNumbers.__getitem__
    recorded = lambda numbers, part: read.append(numbers) or plain(numbers, part)  # noqa: E731
    monkeypatch.setattr(StoredNumbers, "__getitem__", recorded)
    whole.with_begin_token(BOS)
    assert (whole.tokens in read) == scanned


def test_a_search_goes_through_all_of_the_data_in_pieces(folder, monkeypatch):
    expected = TokenFile(folder).with_begin_token(3)[:]
    assert len(expected) == 79 + 8
    monkeypatch.setattr(token_file, "_SCANNED", 4)
    assert (TokenFile(folder).with_begin_token(3)[:] == expected).all()


# Rows as they were read before there were begin tokens, in the order of two epochs.
OF_BEFORE = {
    True: "aab187c7e6ae4b5410ffe79a2c55a9ba69b70f18037eac0273c608a9c93fcd14",
    False: "70b53ae736ea2b2d086d19bd2115ef5d9ce55a62baa003377d7fa75d98e7c2b4",
}


@pytest.mark.parametrize("documents", [True, False])
def test_without_begin_tokens_rows_are_those_of_before_bit_for_bit(folder, documents):
    data = Sequences(TokenFile(folder), 16, 3, documents=documents)
    rows = [data.read(data.order(sample)) for sample in range(2 * len(data))]
    shown = (
        repr((row.tokens.tolist(), row.labels.tolist(), row.documents if documents else None))
        for row in rows
    )
    assert hashlib.sha256("".join(shown).encode()).hexdigest() == OF_BEFORE[documents]


def test_wrong_begin_tokens_are_refused(folder):
    file = TokenFile(folder)
    with pytest.raises(ValueError, match="--bos needs documents that are kept apart: give"):
        Sequences(file, 16, 0, bos=EOS)
    with pytest.raises(ValueError, match=r"data: expected a begin token below 257, .*, got 257"):
        Sequences(file, 16, 0, documents=True, bos=257)
    with pytest.raises(ValueError, match="--bos </s> does not go with --documents ignore"):
        TrainConfig(documents="ignore", bos="</s>")
    with pytest.raises(ValueError, match="--bos does not go with --model cpm-bee-tiny, a cpm-bee"):
        TrainConfig(model="cpm-bee-tiny", bos="<s>").model_config()
    for wrong in (257, -1, "</s>", True, None):
        edit_index(folder, bos_id=wrong)
        with pytest.raises(ValueError, match=f"expected a bos_id among 257 tokens, got {wrong!r}"):
            TokenFile(folder)
