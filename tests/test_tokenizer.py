"""Tokenizers: spelled special tokens, broken files and folders, and identities."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.preparing import write_tokens
from train.cpm_live.tokenizers import AntGreedyTokenizer, BeeTokenizer
from train.data.end_of_text import describe_end, named_ends
from train.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    load_tokenizer,
    open_tokenizer,
    saved_identity,
)

SPELLED = ["a </s> b", "</s>", "</s></s>\n<|endoftext|>x", "but <think>, <tool>, <s> and ü", ""]


def words_file(folder, tokens, special=(), processor=None):
    """Write a tokenizer of whole words."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*special])
    if processor is not None:
        backend.post_processor = processor(backend)
    backend.save(str(folder / "words.json"))
    return str(folder / "words.json")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Return a byte-level BPE, which decodes any text exactly. Two of its added tokens are special,
    two are not.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", "<|endoftext|>"]
    backend.train_from_iterator(
        ["some text to learn </s> from"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet),
    )
    backend.add_tokens(["<think>", AddedToken("<tool>", normalized=False)])
    backend.enable_truncation(2)  # which must have no effect, like the padding
    backend.enable_padding(length=9)
    file = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    backend.save(str(file))
    return file


def test_spelled_special_tokens_stay_text(byte_level, tmp_path):
    open_tokenizer(str(byte_level)).save(tmp_path)
    for tokenizer in (open_tokenizer(str(byte_level)), load_tokenizer(tmp_path), ByteTokenizer()):
        for text in SPELLED:
            ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
            assert tokenizer.eos_id not in ids
            assert tokenizer.decode(ids.tolist()) == text
            assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_special_tokens_among_a_models_pieces_of_text_are_cut(tmp_path):
    """As in T5's file, where </s> is the most likely piece of all. <unk> is special and may be
    encoded.
    """
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -4.0) for c in "▁abs</>")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.save(str(tmp_path / "unigram.json"))
    tokenizer = open_tokenizer(str(tmp_path / "unigram.json"))
    ids = tokenizer.encode("a </s>b</s></s> z </s>" * 50).tolist()
    assert not {0, 1} & set(ids)
    assert 2 in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a</s>b</s></s></s>" * 50


def test_an_end_of_text_token_that_is_not_marked_as_special_is_cut(tmp_path):
    """Unknown text does not become it either."""
    file = words_file(tmp_path, ["</s>", "a", "[UNK]"])
    assert open_tokenizer(file, "</s>").encode("a </s> a").tolist() == [1, 2, 2, 1]
    tokenizer = open_tokenizer(file, "[UNK]")
    assert tokenizer.encode("a a").tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"words.json encodes 'b' only as special token \[UNK\]"):
        tokenizer.encode("a bb")


MAP, CONFIG, GENERATION = "special_tokens_map.json", "config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("special", "beside", "chosen", "remark"),
    [
        # as Gemma, where </s> is a tag of HTML
        (["<eos>", "<bos>"], {CONFIG: {"eos_token_id": 3}}, "<eos>", ""),
        (["<eos>"], {CONFIG: {"eos_token_id": 0}}, "<eos>", "config.json names '</s>'"),
        # as Qwen and Llama 3, where configs name the end of a turn, alone or in a list
        (
            ["<|endoftext|>", "<|im_end|>"],
            {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, GENERATION: {"eos_token_id": 4}},
            "<|endoftext|>",
            "tokenizer_config.json names '<|im_end|>'; generation_config.json names '<|im_end|>'; ",
        ),
        (
            ["<|end_of_text|>", "<|eot_id|>"],
            {GENERATION: {"eos_token_id": [4, 3]}, MAP: {"eos_token": {"content": "<|eot_id|>"}}},
            "<|end_of_text|>",
            "special_tokens_map.json names '<|eot_id|>'; ",
        ),
        # several usual names: configs decide, but only between these
        (["<eos>", "[SEP]"], {CONFIG: {"eos_token_id": 4}}, "[SEP]", ""),
        (["<eos>", "[SEP]"], {CONFIG: {"eos_token_id": [1, -1, 99]}}, "<eos>", "'a', 'token 99'"),
        (["<|im_end|>", "[SEP]", "<eos>"], {CONFIG: {"eos_token_id": 3}}, "<eos>", "'<|im_end|>'"),
        # no usual name
        (["<end>", "<pad>"], {CONFIG: {"eos_token_id": [1, 3]}}, "<end>", ""),
        ([], {"tokenizer_config.json": {"eos_token": "a"}}, "a", ""),
        (["<end>"], {CONFIG: {"eos_token_id": 1}}, None, ""),
        (["<end>"], {}, None, ""),
    ],
)
def test_documents_end_with_a_special_token_and_configs_decide_between_several(
    special, beside, chosen, remark, tmp_path
):
    for name, values in beside.items():
        (tmp_path / name).write_text(json.dumps(values))
    file = words_file(tmp_path, ["</s>", "a", "[UNK]"], special)
    if chosen is None:
        with pytest.raises(ValueError, match=r"no special token '</s>' or .* next to it names one"):
            open_tokenizer(file)
        return
    tokenizer = open_tokenizer(file)
    assert (tokenizer.name_of(tokenizer.eos_id), tokenizer.eos) == (chosen, chosen)
    described = describe_end(chosen, named_ends(tmp_path, tokenizer.name_of))
    assert described.startswith(f"documents end with {chosen!r}")
    assert (remark in described) if remark else described.endswith("'")
    tokenizer.save(tmp_path / "saved")  # without the files next to it
    assert load_tokenizer(tmp_path / "saved").identity == tokenizer.identity


def test_an_older_folder_keeps_its_end_of_text(tmp_path):
    """Even an ordinary token."""
    file = words_file(tmp_path, ["</s>", "a", "[UNK]"], ["<eos>", "<bos>"])
    older = JsonTokenizer(Path(file), older=True)
    older.eos = None
    data = write_tokens(tmp_path / "data", older, "a a " * 20)
    assert '"eos": null' in (data / "tokenizer.spec.json").read_text()
    assert load_tokenizer(data).eos == "</s>"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A SentencePiece model with a control symbol and a symbol that users defined."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "lines.txt").write_text("the quick brown fox jumps over the lazy dog <sep>\n" * 50)
    SentencePieceTrainer.train(
        input=str(folder / "lines.txt"),
        model_prefix=str(folder / "sp"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        control_symbols=["<ctl>"],
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    return folder / "sp.model"


def test_control_symbols_of_sentencepiece_stay_text(sentencepiece):
    tokenizer = open_tokenizer(str(sentencepiece))
    text = "fox </s> dog <s> <ctl> <unk> the <sep> ü"
    ids = tokenizer.encode(text)
    assert not {0, 1, 2, 3} & set(ids)  # <unk>, <s>, </s> and <ctl>
    assert (tokenizer.bos_id, tokenizer.id_of("<s>"), tokenizer.id_of("<none>")) == (1, 1, None)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_broken_tokenizer_files_are_named(tmp_path):
    (tmp_path / "tokenizer.spec.json").write_text('{"kind": "JsonTokenizer", "file": "x.json"}')
    for content in ("", "{}", "[1]", '{"model": 3}', "\0"):
        (tmp_path / "x.json").write_text(content)
        (tmp_path / "x.model").write_text(content)
        for work in (
            lambda: open_tokenizer(str(tmp_path / "x.json")),
            lambda: open_tokenizer(str(tmp_path / "x.model")),
            lambda: load_tokenizer(tmp_path),
        ):
            expected = r"cannot read tokenizer .*x\.(json|model): ."
            with pytest.raises(ValueError, match=expected) as raised:
                work()
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "has no tokenizer"),
        ("{", "does not name a tokenizer: JSONDecodeError"),
        ("[]", "does not name a tokenizer"),
        ('{"kind": "Other", "file": null}', "does not name a tokenizer: KeyError: 'Other'"),
        ("gone.json", r"no tokenizer file .*/gone\.json"),
        ("link.json", "link.json leads out of its folder, to .*bpe.json"),
        ("loop.json", "loop.json leads nowhere|no tokenizer file .*loop.json"),
        *((name, "expected the name of a file") for name in (3, "..", "sub/x")),
    ],
)
def test_folders_without_a_tokenizer_of_their_own_are_refused(spec, message, byte_level, tmp_path):
    (tmp_path / "link.json").symlink_to(byte_level)
    (tmp_path / "loop.json").symlink_to("loop.json")
    if spec is not None:
        is_whole = str(spec).startswith(("{", "["))
        text = spec if is_whole else json.dumps({"kind": "JsonTokenizer", "file": spec})
        (tmp_path / "tokenizer.spec.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_tokenizer_is_found_through_a_link_to_its_folder_but_not_through_one_out_of_it(
    byte_level, tmp_path
):
    open_tokenizer(str(byte_level)).save(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert load_tokenizer(tmp_path / "link").eos_id == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.spec.json").symlink_to("../real/tokenizer.spec.json")
    with pytest.raises(ValueError, match="leads out of its folder"):
        load_tokenizer(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer.spec.json"):
        (tmp_path / "outside").write_text("precious")
        (tmp_path / name).mkdir()
        (tmp_path / name / name).symlink_to("../outside")
        with pytest.raises(ValueError, match="leads out of its folder"):
            open_tokenizer(str(byte_level)).save(tmp_path / name)
        assert (tmp_path / "outside").read_text() == "precious"


def test_a_tokenizer_is_saved_under_a_name_that_no_other_file_has(byte_level, tmp_path):
    (tmp_path / "index.json").write_bytes(byte_level.read_bytes())
    open_tokenizer(str(tmp_path / "index.json")).save(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"tokenizer.json", "tokenizer.spec.json"}


@pytest.mark.parametrize(
    ("special", "in_front", "begin"),
    [
        (["</s>", "<s>"], None, "<s>"),
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|begin_of_text|>", "<|begin_of_text|>"),
        (["<|endoftext|>", "[BEGIN]"], "[BEGIN]", "[BEGIN]"),
        (["<|endoftext|>", "[BEGIN]"], None, "<|endoftext|>"),
        (["</s>"], "", "</s>"),
    ],
)
def test_a_begin_token_is_known_by_its_name_or_its_place_in_front_or_is_the_end_of_text(
    special, in_front, begin, tmp_path
):
    """A piece of text that is called <s> is none."""

    def template(backend):
        tokens = [(token, backend.token_to_id(token)) for token in [in_front] if token]
        single = f"{in_front} $A" if in_front else []
        rules = processors.TemplateProcessing(single=single, special_tokens=tokens)
        return processors.Sequence([processors.ByteLevel(), rules]) if in_front else rules

    made = None if in_front is None else template
    file = words_file(tmp_path, ["a", "<s>", "[UNK]"], special, made)
    tokenizer = open_tokenizer(file)
    assert tokenizer.name_of(tokenizer.bos_id) == begin
    assert tokenizer.bos_id == tokenizer.id_of(begin)
    assert tokenizer.id_of("<none>") is None


def test_the_end_of_text_of_sentencepiece_is_a_control_symbol(sentencepiece, tmp_path):
    open_tokenizer(str(sentencepiece), "<ctl>").save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == 3
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 73440]}')
    assert named_ends(tmp_path, tokenizer.name_of) == {"config.json": ["<ctl>", "token 73440"]}
    for token in ("<sep>", "fox", "<unk>", "", "<end>"):
        with pytest.raises(ValueError, match=f"must be one of its control symbols, got '{token}'"):
            open_tokenizer(str(sentencepiece), token)


def written(folder, name, settings):
    (folder / name).write_text(json.dumps(settings, indent=3))
    return open_tokenizer(str(folder / name)).identity


def test_an_identity_is_of_vocabulary_rules_and_the_end_of_text(byte_level, tmp_path):
    """It does not depend on a file's spelling, nor on fields that encode no text here."""
    settings, mine = json.loads(byte_level.read_text()), open_tokenizer(str(byte_level)).identity
    vocabulary, merges = settings["model"]["vocab"], settings["model"]["merges"]
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    bytes_apart = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True)
    for change in (
        {"truncation": truncation},
        {"post_processor": bytes_apart | {"type": "ByteLevel"}},
        {"model": settings["model"] | {"vocab": dict(reversed(vocabulary.items()))}},
        {"model": settings["model"] | {"merges": [" ".join(pair) for pair in merges]}},
        {"model": {name: value for name, value in settings["model"].items() if value is not None}},
    ):
        assert written(tmp_path, "same.json", settings | change) == mine
    swapped = vocabulary | {"x": vocabulary["y"], "y": vocabulary["x"]}
    added = [token | {"normalized": not token["normalized"]} for token in settings["added_tokens"]]
    for change in (
        {"model": settings["model"] | {"vocab": swapped}},
        {"model": settings["model"] | {"merges": merges[:-1]}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": settings["pre_tokenizer"] | {"add_prefix_space": True}},
        {"added_tokens": added},
    ):
        assert written(tmp_path, "other.json", settings | change) != mine
    assert open_tokenizer(str(byte_level), "<|endoftext|>").identity != mine


def test_an_identity_is_saved_and_loaded(byte_level, sentencepiece, tmp_path):
    (tmp_path / "vocabulary.txt").write_text("<pad>\n<unk>\n<s>\n</s>\n<root>\n<ans>\na\n")
    tokenizers = [
        ByteTokenizer(),
        open_tokenizer(str(byte_level)),
        open_tokenizer(str(byte_level), "<tool>"),
        open_tokenizer(str(sentencepiece)),
        open_tokenizer(str(sentencepiece), "<ctl>"),
        BeeTokenizer(tmp_path / "vocabulary.txt"),
        AntGreedyTokenizer(tmp_path / "vocabulary.txt"),
    ]
    for i, tokenizer in enumerate(tokenizers):
        tokenizer.save(tmp_path / str(i))
        again = load_tokenizer(tmp_path / str(i))
        assert saved_identity(tmp_path / str(i)) == tokenizer.identity == again.identity
        assert (again.eos, again.eos_id) == (tokenizer.eos, tokenizer.eos_id)
    (tmp_path / "vocabulary.txt").write_text("<pad>\n<unk>\n<s>\n</s>\n<root>\n<ans>\nb\n")
    tokenizers.append(BeeTokenizer(tmp_path / "vocabulary.txt"))
    assert len({tokenizer.identity for tokenizer in tokenizers}) == len(tokenizers)


def test_folders_of_older_versions_have_no_identity(byte_level, tmp_path):
    assert saved_identity(tmp_path) is None
    open_tokenizer(str(byte_level)).save(tmp_path)
    (tmp_path / "tokenizer.spec.json").write_text(
        '{"kind": "JsonTokenizer", "file": "tokenizer.json"}'
    )
    assert saved_identity(tmp_path) is None
    assert load_tokenizer(tmp_path).eos == "</s>"
    for broken in ("{", "[]", '{"identity": 5}'):
        (tmp_path / "tokenizer.spec.json").write_text(broken)
        with pytest.raises(ValueError, match=r"tokenizer.spec.json does not name a tokenizer"):
            saved_identity(tmp_path)
