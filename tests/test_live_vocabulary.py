"""Vocabularies of CPM-Live's models: text to pieces and back, and making them from text."""

import errno
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.live import as_jsonl, write_vocabulary
from tests.refusals import refused_line
from train import make_vocabulary
from train.cpm_live.instances import BadRecord
from train.cpm_live.tokenizers import AntGreedyTokenizer, BeeTokenizer, SubIds
from train.data.tokenizer import open_tokenizer


@pytest.fixture
def words(tmp_path):
    pieces = ["a", "ab", "abc", "b", "c", "<", ">", "ans", "ring ring", "x" * 33, "x", "\t"]
    return BeeTokenizer(write_vocabulary(tmp_path / "bee.txt", *pieces, "<mark>"))


def test_a_bees_text_comes_back(words):
    texts = ["abcab\n b", "a<<ans>b", "<<<ans>>", "<mark_2>a<mark_3><mark_2>", "éèa<<é", "x" * 70]
    for text in (*texts, "ring ring ring", "", "\ta"):
        sub_ids = SubIds()
        tokens = [(token, sub_ids.of(token, named)) for token, named in words.pieces(text)]
        assert words.text(tokens, sub_ids) == text


def test_a_bees_pieces(words):
    ids = {piece: i for i, piece in enumerate(words.vocabulary.pieces)}
    assert words.encode("abcabb").tolist() == [ids["abc"], ids["ab"], ids["b"]]
    assert words.encode("\n ").tolist() == [4, 5]
    assert words.encode("<ans>").tolist() == [9]
    assert (words.name_of(9), words.name_of(words.vocab_size)) == ("<ans>", "token 24")
    # text never spells a special token
    assert words.encode("<<ans>").tolist() == [ids["<"], ids["ans"], ids[">"]]
    assert words.encode("x" * 33).tolist() == [ids["x"]] * 33  # pieces have 32 characters at most
    assert words.pieces("éèaé") == [(1, "éè"), (ids["a"], None), (1, "é")]
    assert words.pieces("<mark_2>") == [(ids["<mark>"], "<mark_2>")]
    sub_ids = SubIds()
    assert [sub_ids.of(3, t) for t in ("u", None, "v", "u", "w")] == [0, 0, 1, 0, 2]
    assert sub_ids.of(4, "v") == 0
    assert words.decode([ids["a"], ids["<mark>"], ids["<"]]) == "a<mark><<"
    assert words.text([(ids["<mark>"], 5)]) == "<mark_5>"
    # as CPM-Live has it: one token
    assert {sub_ids.of(*piece) for piece in words.pieces("<mark><mark_1>")} == {0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a < b", "'< b' begins with < but is not a special token"),
        ("<gone>", "<gone> is not a special token of .*bee.txt"),
        ("<gone_1>", "<gone_1> is not a special token"),
        ("<>", "'<>' is not a special token: it has no name"),
    ],
)
def test_a_bees_text_that_names_what_is_not_there_is_refused(words, text, message):
    with pytest.raises(BadRecord, match=message):
        words.encode(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<pad>\n<unk>\n<s>\n</s>\n", "has no line <root>"),
        (b"<pad>\n<unk>\n\n", "expected a piece of text that no other line has, got '' in line 3"),
        (b"<pad>\na\na\n", "a piece of text that no other line has, got 'a' in line 2"),
        (b"<pad>\n\xff\n", "is not UTF-8: invalid start byte at byte 6"),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, content, message):
    (tmp_path / "v.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot read tokenizer .*v.txt: .*{message}"):
        open_tokenizer(f"cpm-bee:{tmp_path / 'v.txt'}")
    with pytest.raises(ValueError, match="no tokenizer file"):
        open_tokenizer(f"cpm-ant-greedy:{tmp_path / 'none.txt'}")


def test_an_ants_text_without_words(tmp_path):
    tokenizer = AntGreedyTokenizer(
        write_vocabulary(tmp_path / "ant.txt", "a", "ab", "b", "<", ">", "s", model="cpm-ant")
    )
    assert tokenizer.decode(tokenizer.encode("abba\n <s>")) == "abba\n <s>"
    # the unknown left out, no special token made
    assert tokenizer.encode("abéb<s>").tolist() == [11, 12, 13, 15, 14]
    assert tokenizer.decode([6, 10, 8, 7]) == "a"


def test_an_ants_text_is_cut_into_jiebas_words_first(tmp_path, monkeypatch):
    file = write_vocabulary(tmp_path / "ant.txt", "a", "ab", "b", model="cpm-ant")
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match=r"needs the package jieba .* cpm-ant-greedy:FILE"):
        open_tokenizer(f"cpm-ant:{file}")
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(cut=list, setLogLevel=str))
    # no piece spans two words
    assert open_tokenizer(f"cpm-ant:{file}").encode("ab").tolist() == [10, 12]
    assert open_tokenizer(f"cpm-ant-greedy:{file}").encode("ab").tolist() == [11]


def test_vocabularies_are_made_of_characters_and_frequent_words(tmp_path):
    lines = [{"ring <<": "def def return", "<ans>": {"<mask_1>": "é"}}] * 3 + ["a < b"]
    file = as_jsonl(tmp_path / "in.jsonl", lines)
    flags = ["--model", "cpm-bee", "--input", str(file), "--output"]
    make_vocabulary.main([*flags, str(tmp_path / "v.txt"), "--size", "24", "--special", "<mark>"])
    pieces = (tmp_path / "v.txt").read_text().split("\n")[:-1]
    assert pieces[:12] == [*make_vocabulary.SPECIAL["cpm-bee"], "<mark>"]
    assert pieces[12:] == ["e", "r", "d", "f", "n", "<", "return", "def", "ring"]
    tokenizer = BeeTokenizer(tmp_path / "v.txt")
    assert tokenizer.encode("return ring").tolist() == [18, 5, 20]


def test_vocabularies_are_written_whole_or_not_at_all(tmp_path, capsys, monkeypatch):
    """Half characters cannot be written, so they are bad lines."""
    lines = [{"a": "\ud800\ud800 x"}, {"\udfff": "x"}, {"a": "ab ab"}]
    file = as_jsonl(tmp_path / "in.jsonl", lines)
    flags = ["--model", "cpm-ant", "--input", str(file), "--output"]
    make_vocabulary.main([*flags, str(tmp_path / "v.txt")])
    assert (tmp_path / "v.txt").read_text().split("\n")[10:-1] == ["a", "b", "ab"]
    assert "2 bad lines were skipped" in capsys.readouterr().err

    def error(name, *options):
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        said = refused_line(capsys, make_vocabulary.main, *flags, tmp_path / name, *options)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        return said

    def full(path, text, **_):
        path.write_bytes(text.encode()[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    assert "v.txt exists and is not replaced" in error("v.txt")
    assert "must leave room" in error("w.txt", "--size", "10")
    assert "--special expects different names" in error("w.txt", "--special", "x")
    half = error("w.txt", "--special", "<\udcff>")
    assert "not Unicode: surrogates not allowed at character 1" in half
    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device: '" in error("w.txt")
