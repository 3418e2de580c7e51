"""Exports with more than weights: other files of --init-from's folder, and code of a MiniCPM."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bmt_burst import Cache, InfLLMV2
from models.cpm import CPM
from models.huggingface import save_weights
from tests.preparing import write_tokens
from tests.runs import train
from tests.test_export import SENTENCES, byte_level_bpe, exported
from tests.test_model import SMALL, initialized
from train.checkpoints.beside import carry_over, read_beside
from train.data.same_tokenizer import check_weights
from train.data.tokenizer import ByteTokenizer, JsonTokenizer

pytestmark = pytest.mark.usefixtures("modules_in_a_folder")

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<pad>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
LLAMA = {"model_type": "llama"}
CHAT = [{"role": "user", "content": "the fox"}]
FILES = {
    "generation_config.json": {
        "bos_token_id": 1,
        "eos_token_id": [3, 2],
        "pad_token_id": 4,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "forced_eos_token_id": 3,
        "transformers_version": "4.51.0",
    },
    "tokenizer_config.json": {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "model_max_length": 4096,
        "padding_side": "left",
        "added_tokens_decoder": {"4": {"content": "<pad>", "special": True}},
    },
    "special_tokens_map.json": {"pad_token": "<pad>", "unk_token": {"content": "<unk>"}},
}
TEXTS = {
    "chat_template.jinja": TEMPLATE,
    "additional_chat_templates/tool.jinja": "{{ tools }}",
    "LICENSE": "You may.",
    "README.md": "# The best weights",
    "modeling_theirs.py": "import theirs",
    "logo.png": "",
}


def tokenizer_in(folder: Path, *more: str) -> JsonTokenizer:
    """Return a tokenizer with `more` tokens after the special ones and those of the text."""
    backend = byte_level_bpe(280, *SPECIAL)
    backend.add_special_tokens(list(more))
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.fixture
def source(tmp_path) -> Path:
    """Return a folder as others publish it."""
    folder = tmp_path / "published"
    tokenizer_in(folder)
    model = initialized(dataclasses.replace(SMALL, max_position_embeddings=2048))
    save_weights(folder, model.config, model.state_dict(), eos_token_id=3, use_cache=True)
    (folder / "additional_chat_templates").mkdir()
    for name, values in FILES.items():
        (folder / name).write_text(json.dumps(values))
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def config_of(source: Path) -> dict:
    return json.loads((source / "config.json").read_text())


def state_of(source: Path, tokenizer, **data) -> dict:
    """Return the parts of a checkpoint's state that an export reads, as they are stored."""
    data_folder = source.with_name("data")
    tokenizer.save(data_folder)
    foreign = check_weights(data_folder, tokenizer, source, allowed=True)
    return json.loads(json.dumps({"beside": read_beside(source, foreign), "data": data}))


def test_an_export_has_the_other_files_of_the_first_weights(source, tmp_path, alone, capsys):
    """Also if the folder is gone since, after a second stage, and from export to export."""
    tokenizer = tokenizer_in(tmp_path / "mine")
    write_tokens(tmp_path / "text", tokenizer, *SENTENCES * 20)
    settings = {"data": str(tmp_path / "text"), "seq_len": 32, "batch_size": 2, "save_every": 1}
    settings |= {"steps": 1, "warmup_steps": 0, "decay_steps": 0, "micro_batch_size": 1}
    settings["accept_field"] = "rope_ratio"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_ratio": [8, "unknown"]}))
    assert train(settings, init_from=str(source), output=str(tmp_path / "run"))
    stage = {"resume": str(tmp_path / "run/step_00000001"), "new_stage": True, "seq_len": 40}
    assert train(settings, **stage, init_from=str(source), output=str(tmp_path / "stage"))
    expected = read_beside(source, None)
    shutil.rmtree(source)
    capsys.readouterr()
    first = exported(tmp_path / "stage", tmp_path / "first", "--keep-scalings")
    printed = capsys.readouterr().out
    assert "generation_config.json: eos_token_id, pad_token_id, do_sample, temperature" in printed
    assert "  config.json: rope_ratio, eos_token_id" in printed
    check(first)
    assert train(settings, init_from=str(first), output=str(tmp_path / "again"))
    second = exported(tmp_path / "again", tmp_path / "second")
    check(second)
    assert read_beside(second, None)["texts"] == expected["texts"]


def check(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<s>the fox<|im_end|>"
    special = tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token
    assert special == ("<pad>", "<|im_end|>", "<unk>")
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (2048, "left")
    assert len(tokenizer) == 111
    mine = JsonTokenizer(folder / "tokenizer.json")
    for text in SENTENCES:  # documents begin with <s>
        assert tokenizer(text).input_ids == [1, *mine.encode(text)]
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.pad_token_id) == ([3, 2], 4)
    assert (generation.temperature, generation.top_p, generation.do_sample) == (0.6, 0.95, True)
    written = json.loads((folder / "config.json").read_text())
    assert (written["eos_token_id"], written["rope_ratio"]) == ([3, 2], [8, "unknown"])
    for name in ("chat_template.jinja", "additional_chat_templates/tool.jinja", "LICENSE"):
        assert (folder / name).read_text() == TEXTS[name]
    names = {path.name for path in folder.iterdir()}
    assert not names & {"README.md", "modeling_theirs.py", "logo.png", "special_tokens_map.json"}


def test_a_larger_vocabulary_keeps_tokens_and_another_tokenizer_does_not(source, tmp_path):
    grown = tokenizer_in(tmp_path / "grown", "<new>")
    carried = carry_over(state_of(source, grown), grown, 1, LLAMA)
    assert carried.tokenizer["pad_token"] == "<pad>"
    assert carried.generation["eos_token_id"] == [3, 2]
    assert "chat_template.jinja" in carried.texts
    foreign = ByteTokenizer()
    carried = carry_over(state_of(source, foreign) | {"accepted": {"a": 1}}, foreign, 256, LLAMA)
    assert (carried.config, carried.generation, carried.tokenizer) == ({"a": 1}, {}, {})
    assert carried.texts == {"LICENSE": "You may."}
    [line] = carried.notes
    assert line == f"left out, since the run has another tokenizer: all but licences of {source}"
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in state_of(source, foreign)["beside"]["foreign"]


def test_facts_of_training_replace_those_of_the_folder(source, tmp_path):
    tokenizer = tokenizer_in(tmp_path / "mine")
    for bos, note in (
        (3, "left out: tokenizer_config.json: bos_token '<s>': training had '<|im_end|>'"),
        (None, "left out: config.json: bos_token_id 1: training had none"),
    ):
        (source / "config.json").write_text(json.dumps(config_of(source) | {"bos_token_id": 1}))
        carried = carry_over(state_of(source, tokenizer, bos=bos), tokenizer, bos, LLAMA)
        assert note in carried.notes
        assert ("bos_token" in carried.tokenizer) == (bos != 3)  # as a name for chat templates


def test_tokens_that_the_tokenizer_lacks_are_noted(source, tmp_path):
    """They are copied as they are."""
    (source / "special_tokens_map.json").write_text(
        '{"pad_token": "[PAD]", "additional_special_tokens": ["<pad>", "<new>"]}'
    )
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 290]}')
    tokenizer = tokenizer_in(tmp_path / "mine")
    carried = carry_over(state_of(source, tokenizer), tokenizer, 1, LLAMA)
    assert carried.tokenizer["pad_token"] == "[PAD]"
    assert carried.generation["eos_token_id"] == [3, 290]
    for note in (
        "eos_token_id: the run's tokenizer has no token 290",
        "pad_token: the run's tokenizer has no token '[PAD]'",
        "additional_special_tokens: the run's tokenizer has no token '<new>'",
    ):
        assert note in carried.notes


def test_the_vocabulary_decides_which_tokens_are_suppressed(source, tmp_path):
    """The padding of the folder's vocabulary may be tokens of the run's tokenizer."""
    generation = {"suppress_tokens": [7, 290], "bos_token_id": 3}
    (source / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = tokenizer_in(tmp_path / "mine", "<new>")
    carried = carry_over(state_of(source, tokenizer), tokenizer, 1, LLAMA)
    assert "suppress_tokens" not in carried.generation
    assert "left out: generation_config.json: bos_token_id 3: training had '<s>'" in carried.notes


def test_a_checkpoint_without_a_record_leaves_all_out():
    """As of older runs, and of --init-from FILE."""
    assert carry_over({"accepted": {"a": 1}}, ByteTokenizer(), 1, LLAMA).config == {"a": 1}
    assert not carry_over({}, ByteTokenizer(), 1, LLAMA).notes


SPARSE = InfLLMV2(block_size=4, kernel_size=4, kernel_stride=2, window_size=8, topk=3, dense_len=-1)
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 7.5]}
PROMPT, TOKENS = 41, 49


def model_of(**change) -> CPM:
    """A model whose tokens attend to few others, so that the choice of blocks matters."""
    model = initialized(dataclasses.replace(SMALL, **change)).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
    return model


def loaded(model: CPM, folder, **settings) -> torch.nn.Module:
    save_weights(folder, model.config, model.state_dict(), torch.float64, 77, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@torch.no_grad()
def decoded(model: CPM, tokens: torch.Tensor) -> torch.Tensor:
    """Our logits of a prompt, and of one token after the other."""
    cache, positions = Cache(None, model.config.num_layers, tokens.shape[1]), torch.arange(TOKENS)
    parts = [slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, TOKENS))]
    return torch.cat([model(tokens[:, p], positions[p], cache=cache) for p in parts], 1)


@torch.no_grad()
def decoded_by(theirs: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same by transformers, whose later versions call past_key_values a cache."""
    name = "past_key_values"
    cache, logits = None, []
    for part in (slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, TOKENS))):
        out = theirs(tokens[:, part], use_cache=True, **({name: cache} if cache else {}))
        name = "cache" if "cache" in out else name
        cache, logits = out[name], [*logits, out.logits]
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": False, "scale_emb": 0.3, "scale_depth": 0.7, "dim_model_base": 24},
        {"num_heads": 3, "num_kv_heads": 1, "scale_depth": None, "dim_model_base": None},
        {"rope_scaling": {"kind": "longrope", "original_length": PROMPT + 2, **FACTORS}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 16}},
        {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 16}},
        {"sparse": SPARSE, "num_kv_heads": 1},
        {"sparse": dataclasses.replace(SPARSE, use_nope=True), "tie_embeddings": False},
        {"sparse": dataclasses.replace(SPARSE, dense_len=PROMPT + 3, init_blocks=2)},
    ],
    ids=str,
)
def test_transformers_computes_our_logits_of_prompts_and_of_later_tokens(tmp_path, change):
    model = model_of(**change)
    theirs = loaded(model, tmp_path / "folder")
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (1, TOKENS))
    later = decoded(model, tokens)
    assert (decoded_by(theirs, tokens) - later).abs().max() < 1e-5 * later.abs().max()
    whole = model(tokens, torch.arange(TOKENS)).detach()
    assert (theirs(tokens).logits - whole).abs().max() < 1e-5 * whole.abs().max()
    if model.config.sparse:
        dense = initialized(dataclasses.replace(model.config, sparse=None)).double()
        dense.load_state_dict(model.state_dict())
        assert (dense(tokens, torch.arange(TOKENS)) - whole).abs().max() > 1e-3 * whole.abs().max()


@pytest.mark.parametrize("sparse", [None, SPARSE], ids=str)
def test_padded_rows_are_generated_as_they_are_alone(tmp_path, sparse):
    """Also by a copy that transformers saved, which brings the code along."""
    theirs = loaded(model_of(sparse=sparse), tmp_path / "folder", bos_token_id=1, eos_token_id=299)
    theirs.save_pretrained(tmp_path / "again")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.manual_seed(0)
    rows = [torch.randint(0, 299, (1, count)) for count in (PROMPT, 33)]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 299}
    alone = [theirs.generate(row, **options)[:, row.shape[1] :] for row in rows]
    lacking = [PROMPT - row.shape[1] for row in rows]
    batch = torch.cat(
        [torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, lacking, strict=True)]
    )
    mask = torch.arange(PROMPT) >= torch.tensor(lacking).unsqueeze(1)
    together = theirs.generate(batch, attention_mask=mask.long(), **options)
    assert together[:, PROMPT:].equal(torch.cat(alone))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"position_ids": torch.arange(30).view(1, 30) % 20}, "one sequence a row"),
        ({"attention_mask": (torch.arange(30).view(1, 30) != 7).long()}, "padding only at sides"),
        ({"attention_mask": torch.ones(1, 1, 30, 30, dtype=torch.bool)}, "as with a dynamic cache"),
    ],
)
def test_a_sparse_model_refuses_what_it_would_compute_wrongly(tmp_path, seen, problem):
    theirs = loaded(model_of(sparse=SPARSE), tmp_path / "folder")
    with pytest.raises(ValueError, match=problem):
        theirs(torch.zeros(1, 30, dtype=torch.long), **seen)
