"""Documents that attend only to themselves, with or without begin tokens, and windows.

From the tokens on disk to losses, layouts, work and FLOPs.
"""

import copy
import dataclasses
import hashlib
import itertools
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bmt_burst import IGNORE_INDEX, Layout, Mask, SequenceParallel, Slice, shift_labels, simulate
from bmt_burst.nn import BurstAttention, rope_tables
from models.config import PRESETS
from tests.preparing import edit_index, write_documents
from tests.rings import on_ranks
from tests.test_batches import batches
from tests.test_model import SMALL, initialized
from train.data import token_file
from train.data.batches import keys_seen
from train.data.folder import Sequences, TokenFile
from train.data.stored import StoredNumbers, TokenWriter
from train.data.tokenizer import ByteTokenizer
from train.loop.measure import step_flops
from train.settings.config import TrainConfig

EOS = ByteTokenizer.eos_id
LENGTHS = (3, 1, 30, 2, 7, 1, 12, 5, 9)  # of documents, without eos: 79 tokens in all


@pytest.fixture
def folder(tmp_path):
    """Return documents whose tokens are their numbers."""
    documents = (np.full(length, document) for document, length in enumerate(LENGTHS))
    return write_documents(tmp_path / "data", documents)


def test_labels_end_with_the_documents_of_a_mask():
    tokens = torch.arange(20).view(2, 10)
    masks = [Mask.documents((0, 4, 9, 10)), Mask.documents((0, 10), window=2)]
    first = [1, 2, 3, -100, 5, 6, 7, 8, -100, -100]
    labels = shift_labels(tokens, mask=masks)
    assert labels.tolist() == [first, [*range(11, 20), -100]]
    second = [label + 10 if label >= 0 else label for label in first]
    assert shift_labels(tokens, mask=masks[0]).tolist() == [first, second]
    assert shift_labels(tokens.T, 0, mask=masks[0]).T.equal(shift_labels(tokens, mask=masks[0]))
    for arguments, error, message in (
        ({"mask": masks[:1]}, ValueError, r"got 1 masks, tokens \(2, 10\) and dim"),
        ({"mask": masks, "dim": 0}, ValueError, r"tokens \(2, 10\) and dim 0"),
        ({"mask": Mask.causal(9)}, ValueError, "expected a mask of 10 tokens, got one of 9"),
        ({"mask": 3}, TypeError, "mask must be a Mask or one for each row, got int"),
    ):
        with pytest.raises(error, match=message):
            shift_labels(tokens, **arguments)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 9, 4], "documents must start at rising places in the 79 tokens"),
        ([0, 9, 79], "must start at rising places"),
        ([1, 9], r"must start with a document at token 0, got \[1\]"),
        ([], r"must start with a document at token 0, got \[\]"),
    ],
)
def test_wrong_starts_of_documents_are_refused(folder, starts, message, monkeypatch):
    edit_index(folder, "documents.bin", documents=len(starts))
    np.array(starts, dtype=np.int64).tofile(folder / "documents.bin")
    expected = f"documents.bin.*{message}"
    with pytest.raises(ValueError, match=expected):
        TokenFile(folder)
    # a large file is checked where it is read
    monkeypatch.setattr("train.data.token_file._CHEAP", 0)
    with pytest.raises(ValueError, match=expected):
        Sequences(TokenFile(folder), 78, 0, documents=True).read(0)
    # all is checked, since all places depend on it
    with pytest.raises(ValueError, match=expected):
        Sequences(TokenFile(folder), 1, 0, documents=True, bos=EOS)


WINDOWED = dataclasses.replace(SMALL, window=6, window_pattern="wwf")
MODELS = {"full": SMALL, "windowed": dataclasses.replace(SMALL, window=6), "mixed": WINDOWED}


@pytest.mark.parametrize("layout", ["auto", "striped"])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_have_the_parts_of_rows_that_they_compute_with(folder, monkeypatch, layout, model):
    """Unsharded, the rows are as read. Positions restart in each document. Work is counted."""
    data, model = Sequences(TokenFile(folder), 26, 0, documents=True), MODELS[model]
    rows = [data.read(index) for index in range(2)]
    read = [
        batches(monkeypatch, rank, 3, 3, model, seq_len=26, layout=layout)._read(data, [0, 1])
        for rank in range(3)
    ]
    work = [0, 0, 0]
    for i, row in enumerate(rows):
        mask = Mask.documents(row.documents)
        balanced_by = mask.windowed(6) if model is MODELS["windowed"] else mask
        cut = Layout.balanced(balanced_by, 3) if layout == "auto" else Layout.striped(26, 3)
        assert all(batch.masks[i] == mask and batch.layouts[i] == cut for batch in read)
        whole = {"tokens": row.tokens, "labels": row.labels, "positions": mask.positions()}
        for name, expected in whole.items():
            assert cut.unshard([getattr(b, name)[i] for b in read], 0).equal(expected), name
        for window in model.windows:
            visible = (mask if window is None else mask.windowed(window)).dense()
            for rank in range(3):
                work[rank] += int(visible[cut.positions(rank)].sum())
    assert {batch.documents for batch in read} == {sum(len(row.documents) - 1 for row in rows)}
    assert {batch.work for batch in read} == {tuple(work)}


def test_keys_seen_are_those_of_the_dense_mask():
    slices = Slice((0, 6), (2, 5)), Slice((1, 9), (5, 9)), Slice((2, 7), (0, 2), None, 4)
    for mask in (
        Mask.causal(7),
        Mask.full(5),
        Mask.documents((0, 1, 5, 9, 30), window=4),
        Mask.documents((0, 4, 20), causal=False, window=3),
        Mask(6, ()),
        Mask(9, slices),
        Mask.causal(7).windowed(sys.maxsize),
        Mask.documents((0, 4, 20), window=5).rows(6, 17),
        Mask(6, [Slice((1, 5), (2, 9), -5, -1), Slice((5, 6), (0, 2), 5, 9)], kv_len=9),
    ):
        assert keys_seen(mask).equal(mask.dense().sum(1))
        assert int(keys_seen(mask).sum()) == mask.area


def test_flops_count_visible_pairs_alone():
    """Against the operations of every product, written out."""
    c = WINDOWED
    full, windowed = Mask.documents((0, 5, 26)), Mask.documents((0, 5, 26), window=6)
    matrices = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    matrices = (
        c.num_layers * (matrices + 3 * c.hidden_size * c.intermediate_size)
        + c.hidden_size * c.vocab_size
    )
    # two layers of three have windows
    pairs = 2 * int(windowed.dense().sum()) + int(full.dense().sum())
    forward = 2 * matrices * 26 + 2 * 2 * c.num_heads * c.head_dim * pairs
    assert step_flops(c, 26, pairs) == 3 * forward
    # as PaLM counts, halved for the causal mask, to the share of the diagonal
    llama = PRESETS["7b"]
    pairs = llama.num_layers * 4096 * 4097 // 2
    expected = 6 * (llama.num_parameters - 65 * 4096 - 32000 * 4096) + 6 * 32 * 32 * 128 * 4096
    assert step_flops(llama, 4096, pairs) / 4096 == pytest.approx(expected, rel=1e-4)


def token_losses(size: int, model, tokens, masks, layouts) -> torch.Tensor:
    """Return the loss of each token but the last ones of documents, of a model over simulated
    ranks: (B, S) fp32.
    """
    labels = shift_labels(tokens, mask=masks)

    def of_rank(sp):
        shards = [
            [layout.shard(x, sp.rank, 0) for x, layout in zip(whole, layouts, strict=True)]
            for whole in (tokens, labels, [mask.positions() for mask in masks])
        ]
        mine, targets, positions = map(torch.stack, shards)
        logits = initialized(model, sp=sp)(mine, positions, mask=masks, layout=layouts)
        return F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none"
        ).detach()

    parts = on_ranks(size, of_rank)
    return torch.stack(
        [layout.unshard([part[i] for part in parts], 0) for i, layout in enumerate(layouts)]
    )


CUTS = [(0, 3, 20, 21, 37), (0, 16, 37)]


@pytest.mark.parametrize("size", [1, 4])
def test_a_document_is_as_if_it_were_alone_and_no_other_one_changes_a_bit_of_it(size):
    """Two rows have other documents, over ranks of a balanced layout."""
    tokens = torch.randint(0, 300, (2, 37), generator=torch.Generator().manual_seed(1))
    masks = [Mask.documents(cut) for cut in CUTS]
    layouts = [Layout.balanced(mask, size) for mask in masks]
    losses = token_losses(size, WINDOWED, tokens, masks, layouts)
    other = tokens.clone()
    other[0, 3:20] = (other[0, 3:20] + 7) % 300
    changed = token_losses(size, WINDOWED, other, masks, layouts)
    untouched = torch.ones(2, 37, dtype=torch.bool)
    untouched[0, 3:20] = False
    assert losses[untouched].equal(changed[untouched])
    assert (losses[0, 3:19] != changed[0, 3:19]).all()
    for row, cut in enumerate(CUTS):
        for start, stop in itertools.pairwise(cut):
            alone = tokens[row : row + 1, start:stop]
            whole = [Mask.causal(stop - start)]
            expected = token_losses(1, WINDOWED, alone, whole, [Layout.contiguous(stop - start, 1)])
            assert torch.allclose(losses[row : row + 1, start:stop], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_a_window_is_the_dense_one():
    """With no mask of its own, with one, and over ranks."""
    x, tables = torch.randn(2, 21, 16), rope_tables(torch.arange(21), 4)

    def layer(like=None, **options):
        made = BurstAttention(16, 4, 2, **options)
        made.load_state_dict((like or made).state_dict())
        return made

    whole = layer()
    windowed = layer(whole, window=5)
    expected = whole(x, *tables, mask=Mask.window(21, 5))
    assert windowed(x, *tables).equal(expected)
    assert windowed(x, *tables, mask=Mask.causal(21)).equal(expected)
    documents = [Mask.documents((0, 8, 21)), Mask.causal(21)]
    expected_rows = whole(x, *tables, mask=[mask.windowed(5) for mask in documents])
    assert windowed(x, *tables, mask=documents).equal(expected_rows)

    def of_rank(sp):
        mine = layer(whole, window=5, sp=sp)
        part = sp.shard(x), *rope_tables(sp.positions(21), 4)
        layout = Layout.zigzag(21, 2)
        known = {}, {"mask": Mask.causal(21)}, {"layout": layout}, {"layout": [layout] * 2}
        return [mine(*part, **options) for options in known]

    for parts in zip(*on_ranks(2, of_rank), strict=True):
        assert torch.allclose(
            Layout.zigzag(21, 2).unshard(parts, 1), expected, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(TypeError, match="mask must be a Mask or one for each row, got str"):
        windowed(x, *tables, mask=["causal", "causal"])


def test_balanced_of_a_layer_with_a_window_is_the_layout_of_the_mask_as_passed():
    """A model cuts its tokens once, for layers with and without a window."""
    x, mask = torch.randn(1, 21, 16), Mask.causal(21)
    layer = BurstAttention(16, 4, 2, window=5)
    layout = Layout.balanced(mask, 2)
    assert layout != Layout.balanced(mask.windowed(5), 2)
    expected = layer(x, *rope_tables(torch.arange(21), 4), mask=mask)

    def of_rank(ring):
        mine = copy.copy(layer)
        mine.sp = SequenceParallel(ring.rank, 2, process_group=ring)
        part = layout.shard(x, ring.rank), *rope_tables(layout.positions(ring.rank), 4)
        return mine(*part, mask=mask, layout="balanced")

    torch.testing.assert_close(layout.unshard(simulate(2, of_rank)), expected)


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
