"""How texts of released models and of runs begin and end, compared with transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.test_export import byte_level_bpe
from tests.test_export_beside import source, state_of, tokenizer_in  # noqa: F401
from tests.test_tokenizer import sentencepiece  # noqa: F401
from train.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer
from train.generation.decoding import TextRules
from train.trained.model import open_trained
from train.trained.texts import folder_begin_token, folder_stops, lacking_tokens, run_stops

PROMPT = "the <|im_start|>fox<|im_end|> <s>"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


def template(*parts: str) -> dict:
    """Return a post_processor: special tokens by name, and the text as $A."""
    names = {part: i for i, part in enumerate(SPECIAL) if part in parts}
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in names.items()}
    pieces = [
        {"SpecialToken": {"id": part, "type_id": 0}}
        if part in special
        else {"Sequence": {"id": "A", "type_id": 0}}
        for part in parts
    ]
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


SPECIAL = ["<unk>", "<s>", "</s>", "<bos>", "<|im_start|>", "<|im_end|>"]
ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}
ROBERTA |= {"trim_offsets": True, "add_prefix_space": False}


def folder_of(folder: Path, rules: dict | None, config: dict, model: dict | None = None) -> Path:
    """Write a tokenizer with special tokens of several families, and configurations."""
    folder.mkdir(exist_ok=True)
    values = json.loads(byte_level_bpe(280, *SPECIAL).to_str()) | {"post_processor": rules}
    values["decoder"] = BYTES
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (model or {})))
    return folder


def begin(folder: Path) -> str | None:
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    found = folder_begin_token(folder, tokenizer)
    return None if found is None else tokenizer.name_of(found)


@pytest.mark.parametrize(
    ("rules", "config", "expected"),
    [
        # as Llama 3, Gemma, MiniCPM4 and Qwen
        ({"type": "Sequence", "processors": [BYTES, template("<bos>", "$A")]}, {}, "<bos>"),
        (template("<bos>", "$A"), {"tokenizer_class": "GemmaTokenizer"}, "<bos>"),
        (template("<s>", "$A"), {"tokenizer_class": "LlamaTokenizerFast"}, "<s>"),
        (BYTES, {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, None),
        (ROBERTA, {}, "<s>"),
        (template("$A", "</s>"), {"tokenizer_class": "LlamaTokenizer"}, None),
        ({"type": "Sequence", "processors": [template("$A"), BYTES]}, {}, None),
    ],
)
def test_a_post_processor_says_how_a_text_begins(rules, config, expected, tmp_path, capsys):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    folder = folder_of(tmp_path, rules, config)
    assert begin(folder) == expected
    theirs = AutoTokenizer.from_pretrained(folder)
    first = theirs.convert_ids_to_tokens(theirs("the fox").input_ids)[0]
    assert first == (expected or theirs.tokenize("the fox")[0])
    assert capsys.readouterr().err == ""
    folder_of(tmp_path, rules, config | {"add_bos_token": expected is None})
    assert begin(folder) == expected
    assert f"add_bos_token {str(expected is None).lower()}: the first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        ({"add_bos_token": True, "bos_token": {"content": "<bos>"}}, {}, "<bos>"),
        ({"add_bos_token": True, "tokenizer_class": "Qwen2Tokenizer"}, {}, "<s>"),
        ({"add_bos_token": True, "bos_token": None}, {}, None),
        ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, {}, None),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, "<s>"),
        ({"tokenizer_class": "GemmaTokenizerFast", "bos_token": "<bos>"}, {}, "<bos>"),
        ({"tokenizer_class": "Qwen2TokenizerFast", "bos_token": "<s>"}, {}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}, {}, None),
        ({}, {"tokenizer_class": "LlamaTokenizerFast"}, "<s>"),
        ({}, {}, None),
    ],
)
def test_without_a_post_processor_add_bos_token_decides_or_the_class(
    config, model, expected, tmp_path
):
    assert begin(folder_of(tmp_path, None, config, model)) == expected


def test_several_tokens_in_front_of_a_text_and_no_text_are_refused(tmp_path):
    for parts, message in (
        (("<bos>", "<s>", "$A"), "json puts '<bos>', '<s>' .* give --bos TOKEN or none"),
        (("<bos>",), "json: expected a post_processor that keeps the text"),
    ):
        with pytest.raises(ValueError, match=message):
            begin(folder_of(tmp_path, template(*parts), {}))


def test_a_tokenizer_without_a_file_or_a_class_keeps_its_begin_token(sentencepiece, tmp_path):  # noqa: F811
    lone = open_tokenizer(str(sentencepiece))
    assert folder_begin_token(sentencepiece.parent, lone) == 1  # as Llama's
    folder = folder_of(tmp_path / "published", BYTES, {})
    assert folder_begin_token(folder, ByteTokenizer()) == ByteTokenizer.bos_id
    ByteTokenizer().save(tmp_path, begin=None)  # an export for bmtrain
    assert folder_begin_token(tmp_path, ByteTokenizer()) is None
    ByteTokenizer().save(tmp_path)  # an older one
    (tmp_path / "model.json").write_text("{}")
    assert folder_begin_token(tmp_path, ByteTokenizer()) == ByteTokenizer.bos_id


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ([2, 5], None, {2, 5}),
        (2, {"eos_token_id": [5, 2, 4]}, {2, 4, 5}),
        (5, {}, {5}),
        (None, {"eos_token_id": 5}, {5}),
        (-1, {"eos_token_id": None}, {2}),  # the tokenizer's
    ],
)
def test_texts_of_a_folder_end_with_the_tokens_that_it_lists(
    config, generation, expected, tmp_path, capsys
):
    folder = folder_of(tmp_path, BYTES, {}, {"eos_token_id": config})
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    assert folder_stops(str(folder), tokenizer) == expected
    assert folder_stops(str(folder / "model.safetensors"), tokenizer) == expected
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 280]}')
    assert 280 not in folder_stops(str(folder), tokenizer)  # rows of padding
    assert "eos_token_id lists 280, but the tokenizer has only" in capsys.readouterr().err


def test_texts_of_a_run_end_as_those_of_its_export(source, tmp_path):  # noqa: F811
    tokenizer = tokenizer_in(tmp_path / "mine")
    assert run_stops(state_of(source, tokenizer), tokenizer) == {2, 3}  # </s> and <|im_end|>
    foreign = ByteTokenizer()
    assert run_stops(state_of(source, foreign), foreign) == {foreign.eos_id}
    assert run_stops({}, tokenizer) == {2}  # an older run


def test_special_tokens_of_a_prompt_are_letters_or_tokens(sentencepiece, tmp_path, capsys):  # noqa: F811
    """A prompt that has the begin token gets no second one."""
    folder = folder_of(tmp_path, BYTES, {})
    ours, theirs = JsonTokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    front, ids = TextRules(1, special=True).encode(ours, PROMPT)
    assert (front, ids) == ([1], theirs(PROMPT).input_ids) and {4, 5, 1} <= set(ids)
    assert TextRules(special=True).decode(ours, ids) == PROMPT
    assert TextRules(1, special=True).encode(ours, "<s>the") == ([], theirs("<s>the").input_ids)
    front, letters = TextRules(1).encode(ours, PROMPT)
    assert front == [1] and not {1, 2, 3, 4, 5} & set(letters)  # but <unk>
    assert TextRules().encode(ours, "") == ([2], [])
    pieces, prompt = open_tokenizer(str(sentencepiece)), "<ctl>fox</s><ctl>"
    ids = pieces.encode_special(prompt)
    assert ids == [3, *pieces.encode("fox"), 2, 3]
    assert pieces.decode_special(ids) == prompt
    assert ByteTokenizer().encode_special("a<|endoftext|>") == [97, 256]
    rules = TextRules(longest=20)
    rules.warn(ours, PROMPT, 12, 8)
    said = capsys.readouterr().err
    assert said == (
        "the prompt spells special tokens, which are read as letters: <s>, <|im_start|>, "
        "<|im_end|>; --special reads them as tokens\n"
    )
    TextRules(special=True).warn(ours, PROMPT, 12, 9)
    rules.warn(ours, "the <pad>", 12, 8)
    assert capsys.readouterr().err == ""
    rules.warn(ours, "the", 1200, 8)
    assert capsys.readouterr().err == (
        "the prompt's 1,200 tokens and --tokens 8 are beyond the 20 tokens that the model was made "
        "for: give a shorter prompt or fewer --tokens\n"
    )


def test_a_file_of_weights_needs_its_model(tmp_path):
    """The default model is not what its user chose."""
    special = (f"<|{i}|>" for i in range(320))
    byte_level_bpe(330, "</s>", *special).save(str(tmp_path / "tokenizer.json"))
    given = {"init_from": str(tmp_path / "model.safetensors"), "seq_len": 8}
    message = r"of at most 320 tokens, which the default model cpm-tiny has, .*: give --model"
    with pytest.raises(ValueError, match=message):
        open_trained(given, None, None, torch.device("cpu"))


def test_tokens_that_only_other_files_of_a_folder_have_are_named(tmp_path, capsys):
    """transformers adds them to the tokenizer."""
    names = {"280": "<|tool|>", "4": "<|im_start|>", "281": "<|end|>"}
    decoder = {i: {"content": name} for i, name in names.items()}
    folder = folder_of(tmp_path, BYTES, {"added_tokens_decoder": decoder})
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    lacking = lacking_tokens(str(folder), tokenizer)
    assert lacking == ("<|tool|>", "<|end|>")
    rules = TextRules(special=True, lacking=lacking)
    rules.warn(tokenizer, "<|im_start|>fox", 5, 5)
    assert capsys.readouterr().err == ""
    rules.warn(tokenizer, "<|im_start|>fox<|end|>", 5, 5)
    assert "lacks, which are read as letters: <|end|>; AutoTokenizer" in capsys.readouterr().err
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": ["<|end|>"]}')
    with pytest.raises(ValueError, match="expected added_tokens_decoder to have tokens by id"):
        lacking_tokens(str(folder), tokenizer)
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": null}')
    assert lacking_tokens(str(folder), tokenizer) == ()
