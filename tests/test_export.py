"""Exports: what transformers loads by itself computes what was trained, with the same tokens; whole
or not there.
"""

import dataclasses
import json
import random
import resource
import signal
import subprocess
from pathlib import Path
from unittest.mock import ANY

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bmt_burst import InfLLMV2
from models.config import CPMConfig
from models.hf_families import FAMILIES
from models.huggingface import HFWeights, fold_scalings, load_cpm, save_weights
from tests.launcher import world_of_one
from tests.refusals import refused_line
from tests.runs import make_settings, train
from tests.test_checkpoint import write
from tests.test_model import SMALL, initialized
from train.checkpoints import checkpoint
from train.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    saved_identity,
)
from train.engine import Shard
from train.export import main
from train.generate import Sampling, generate
from train.generate import main as generate_main
from train.generation.decoding import TextRules
from train.planning.search import Cluster, plan
from train.planning.seconds import H200
from train.settings.config import TrainConfig
from train.trained.hf_tokenizer import save_for_transformers
from train.trained.model import checkpoint_tokenizer, load_model

# a vocabulary of 300 for 257 byte tokens
PADDED = dataclasses.replace(SMALL, rope_theta=5e5)
SENTENCES = [
    "the quick brown fox jumps over the lazy dog, don't you think?",
    "hello  world, how  are you\ttoday? 漢字 é",
]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with world_of_one():
        yield


def run_of(
    root: Path,
    config: CPMConfig,
    tokenizer: Tokenizer,
    factor: float = 1.0,
    longest_row: int | None = None,
    **data,
) -> Path:
    """Return a run's folder with one checkpoint of random weights, which favour tokens that the
    tokenizer does not have.

    `data` is how the run read its data. By default it is an older run, without this and without a
    `longest_row`.
    """
    weights = {name: p.detach() * factor for name, p in initialized(config).named_parameters()}
    weights["embed_tokens.weight"][tokenizer.vocab_size :] *= 5
    shards = {
        f"weight/{name}": Shard(w.flatten(), 0, tuple(w.shape)) for name, w in weights.items()
    }
    state = {
        "step": 3,
        "samples": 24,
        "optimizer_steps": 3,
        "model": config.to_dict(),
        "config": {"seq_len": 77, "dtype": "fp32"},
        "data": data,
    }
    state |= {"longest_row": longest_row} if longest_row else {}
    write(root, state, shards)
    tokenizer.save(root / "tokenizer")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_of(tmp_path_factory.mktemp("export") / "run", PADDED, ByteTokenizer())


def exported(run: Path, output: Path, *options: str) -> Path:
    main(["--run", str(run), "--output", str(output), *options])
    return output


def refusal(capsys, *arguments: object) -> str:
    printed = refused_line(capsys, main, *arguments)
    assert printed.startswith("export.py: ")
    return printed


SCALINGS = [
    {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16, "tie_embeddings": True},
    {"scale_emb": 0.3, "scale_depth": None, "dim_model_base": None},
    {"scale_emb": 1.0, "scale_depth": 0.7, "dim_model_base": 24, "tie_embeddings": False},
    {"head_dim": 6, "num_kv_heads": 4, "scale_emb": 1.0, "tie_embeddings": False},
]


@pytest.mark.parametrize("change", SCALINGS, ids=str)
def test_a_folded_model_is_a_llama_with_the_same_logits(tmp_path, change):
    model = initialized(dataclasses.replace(SMALL, **change))
    with torch.no_grad():
        model.norm.weight.mul_(torch.rand(32) + 0.5)
    tokens = torch.randint(0, 300, (2, 21))
    expected = model(tokens, torch.arange(21)).detach()
    config, weights = fold_scalings(model.config, model.state_dict())
    assert weights.keys() == model.state_dict().keys()
    save_weights(tmp_path, config, weights)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(llama) is LlamaForCausalLM
    for logits in (llama(tokens).logits, load_cpm(tmp_path)(tokens, torch.arange(21))):
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("kind", "prompt"), [("json", "the lazy"), ("BPE", "")])
def test_a_begin_token_stands_in_front_of_a_prompt_as_in_training(tmp_path, kind, prompt, capsys):
    """Here and in transformers. Without it the answer differs."""
    tokenizer = TOKENIZERS[kind](tmp_path)
    config = dataclasses.replace(PADDED, vocab_size=tokenizer.vocab_size, tie_embeddings=False)
    bos = tokenizer.bos_id
    rules = TextRules(bos)
    run = run_of(tmp_path / "run", config, tokenizer, documents="mask", bos=bos)
    folder = exported(run, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    given = theirs(prompt, return_tensors="pt")
    assert given.input_ids.tolist() == [[bos, *tokenizer.encode(prompt)]]
    ids = model.generate(**given, max_new_tokens=30, do_sample=False)
    path = checkpoint.find(run)
    ours, same = load_model(run), checkpoint_tokenizer(path)
    expected = generate(ours, same, prompt, 30, Sampling(0), rules=rules)
    assert tokenizer.decode(ids[0, 1:].tolist()) == expected
    assert generate(ours, same, prompt, 30) != generate(ours, same, prompt, 30, rules=rules)
    capsys.readouterr()
    generate_main(["--run", str(run), "--prompt", prompt, "--tokens", "30", "--temperature", "0"])
    printed, said = capsys.readouterr()
    assert printed == expected + "\n"
    assert said.startswith("prefill of ") and said.count("\n") == 1
    weights = exported(run, tmp_path / "bmtrain", "--format", "bmtrain") / "model.pt"
    capsys.readouterr()
    for source in (folder, weights):  # exports begin texts as the run does
        more = ["--model", str(weights.with_suffix(".json"))] * (source == weights)
        line = ["--init-from", str(source), *more, "--prompt", prompt, "--tokens", "30"]
        generate_main([*line, "--temperature", "0"])
        assert capsys.readouterr() == (expected + "\n", ANY)


@pytest.mark.parametrize(
    ("data", "begin"),
    [
        ({}, 256),
        ({"documents": "ignore"}, 256),
        ({"documents": "mask"}, None),
        ({"documents": "mask", "bos": 7}, 7),
    ],
)
def test_the_begin_token_of_an_export_is_that_of_training(tmp_path, data, begin, capsys):
    """Documents that are kept apart have no other token in front of them."""
    run = run_of(tmp_path / "run", PADDED, ByteTokenizer(), **data)
    folder = exported(run, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["bos_token_id"] == begin
    assert AutoConfig.from_pretrained(folder).bos_token_id == begin
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (begin, 256)
    assert theirs("ab").input_ids == [*([7] if data.get("bos") else []), 97, 98]
    capsys.readouterr()
    generate_main(["--run", str(run), "--tokens", "1"])
    warning = "trained without begin tokens (--bos) and cannot begin a text: give a --prompt"
    assert (warning in capsys.readouterr().err) == (data == {"documents": "mask"})


def test_an_exported_folder_has_what_others_need_to_know(run, tmp_path):
    folder = exported(run, tmp_path / "out")
    written = json.loads((folder / "config.json").read_text())
    for read in (written, AutoConfig.from_pretrained(folder).to_dict()):
        assert read["model_type"] == "llama"
        assert read["max_position_embeddings"] == 77
        assert read["bos_token_id"] == read["eos_token_id"] == 256
        assert read["dtype"] == "float32"
        assert read["rope_parameters"]["rope_theta"] == 5e5
    # as transformers 4 reads them
    assert (written["torch_dtype"], written["rope_theta"]) == ("float32", 5e5)
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 256
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize(
    ("made_for", "longest_row", "longest", "original"),
    [(131_072, 77, 131_072, None), (64, 4096, 4096, 64), (None, 4096, 4096, None)],
)
def test_an_export_is_for_the_longest_sequence_that_the_model_was_made_for_or_trained_on(
    tmp_path, made_for, longest_row, longest, original
):
    """Where training went beyond the length that it was made for, the folder has both."""
    config = dataclasses.replace(PADDED, max_position_embeddings=made_for)
    run = run_of(tmp_path / "run", config, ByteTokenizer(), longest_row=longest_row)
    folder = exported(run, tmp_path / "out")
    written = json.loads((folder / "config.json").read_text())
    assert written["max_position_embeddings"] == longest
    assert written.get("original_max_position_embeddings") == original
    assert AutoTokenizer.from_pretrained(folder).model_max_length == longest
    assert HFWeights(folder).config.max_position_embeddings == longest


def test_scalings_can_be_kept(run, tmp_path, capsys):
    folder = exported(run, tmp_path / "out", "--keep-scalings")
    assert "trust_remote_code" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text())["model_type"] == "minicpm"
    kept, weights = HFWeights(folder), checkpoint.Checkpoint(checkpoint.find(run)).weights()
    assert kept.config.max_position_embeddings == 77
    same = {"init_std": PADDED.init_std, "max_position_embeddings": None}
    assert dataclasses.replace(kept.config, **same) == PADDED
    assert all(kept[name].equal(weight) for name, weight in weights.items())


def test_sparse_models_stay_minicpm(tmp_path, capsys):
    """Their scalings are folded, and no other model of transformers is sparse."""
    sparse = InfLLMV2(block_size=4, kernel_size=4, kernel_stride=2, window_size=8, topk=3)
    run = run_of(tmp_path / "run", dataclasses.replace(PADDED, sparse=sparse), ByteTokenizer())
    folder = exported(run, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "trust_remote_code" in printed and "sparse attention" in printed
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == "minicpm"
    assert written["sparse_config"] == sparse.to_dict()
    assert HFWeights(folder).config.scale_emb == 1.0


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_written_in_the_dtype_asked_for(run, tmp_path, umask, name, dtype):
    """Modes of files follow the umask."""
    folder = exported(run, tmp_path / "out", "--dtype", name)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
    read, exact = HFWeights(folder), HFWeights(exported(run, tmp_path / "exact"))
    assert all(read[name].equal(exact[name].to(dtype)) for name in exact)
    shape = exported(run, tmp_path / "bmtrain", "--format", "bmtrain", "--dtype", name)
    assert {w.dtype for w in torch.load(shape / "model.pt", weights_only=True).values()} == {dtype}


def test_models_that_cannot_be_written_are_refused_and_leave_nothing(tmp_path, capsys):
    """Weights beyond the dtype, and a model that is like no other."""
    large = run_of(tmp_path / "large", PADDED, ByteTokenizer(), factor=1e6)
    config = dataclasses.replace(PADDED, o_bias=True, qk_norm=True)
    odd = run_of(tmp_path / "odd", config, ByteTokenizer())
    for run, kind, message in (
        (large, "huggingface", "too large for float16"),
        (large, "bmtrain", "too large for float16"),
        (odd, "huggingface", "qwen3 without o_bias=True; seed_oss without qk_norm=True"),
    ):
        options = ("--run", run, "--output", tmp_path / "out", "--format", kind, "--dtype", "fp16")
        assert message in refusal(capsys, *options)
    assert {path.name for path in tmp_path.iterdir()} == {"large", "odd"}


def test_what_is_there_is_not_written_to(run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    without = ("--run", tmp_path / "no run", "--output")
    for name in ("folder", "file", "link"):
        assert f"{name} exists" in refusal(capsys, *without, tmp_path / name)
    assert "no checkpoint in" in refusal(capsys, *without, tmp_path / "out/deep")
    assert not (tmp_path / "out").exists()
    assert "Not a directory" in refusal(capsys, "--run", run, "--output", tmp_path / "file/out")


def test_what_a_killed_export_left_is_replaced(run, tmp_path):
    (tmp_path / ".out.partial/folder").mkdir(parents=True)
    (tmp_path / ".out.partial/model-00001-of-00002.safetensors").write_text("half")
    names = {file.name for file in exported(run, tmp_path / "out").iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert names == expected | {f"tokenizer{x}.json" for x in ("", ".spec", "_config")}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_export_leaves_a_line_and_nothing_else(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "save", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as stopped:
        exported(run, tmp_path / "out", "--format", "bmtrain")
    assert (stopped.value.code, [*tmp_path.iterdir()]) == (130, [])
    assert capsys.readouterr().err == "export.py: interrupted, nothing was written\n"


@pytest.mark.parametrize("kind", ["huggingface", "bmtrain"])
def test_a_full_disk_is_named(run, tmp_path, capsys, kind):
    """Weights stop growing at 20,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        printed = refusal(capsys, "--run", run, "--output", tmp_path / "out", "--format", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not write" in printed and "File too large" in printed
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_brings_its_own_tokenizer(run, tmp_path, capsys):
    [path] = checkpoint.listed(run)
    copied = tmp_path / path.name
    subprocess.run(["cp", "-r", path, copied], check=True)
    assert "has no tokenizer" in refusal(capsys, "--run", copied, "--output", tmp_path / "out")
    ByteTokenizer().save(copied / "tokenizer")
    assert AutoTokenizer.from_pretrained(exported(copied, tmp_path / "out")).eos_token_id == 256


# Tokenizers


def texts() -> list[str]:
    """Any characters, words of the tokenizers' training text, and corners."""
    random.seed(0)

    def character() -> str:
        ranges = (1, 127), (0, 0xD7FF), (0x10000, 0x10FFFF)
        return chr(random.randrange(*random.choice(ranges)))

    words = " ".join(SENTENCES).split()
    corners = ["", " ", "  lead", "trail \n", "a  b", "\t\r\n x"]
    corners += ["ﬁ Å", "\u2581x", "é漢字🙂\x00\x01\u2028"]
    return [
        *corners,
        *("".join(character() for _ in range(30)) for _ in range(50)),
        *(" ".join(random.choices(words, k=20)) for _ in range(50)),
    ]


def byte_level_bpe(size: int, *special: str) -> Backend:
    """Return a tokenizer that is made from the sentences."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*special], show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


def json_tokenizer(folder: Path) -> JsonTokenizer:
    """One that cuts texts, fills them, and puts a token before them, unless told not to."""
    backend = byte_level_bpe(400, "<unk>", "<s>", "</s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.enable_truncation(5)
    backend.enable_padding()
    backend.save(str(folder / "mine.json"))
    return JsonTokenizer(folder / "mine.json")


def sentencepiece_tokenizer(folder: Path, kind: str, **options) -> SentencePieceTokenizer:
    (folder / "text.txt").write_text("\n".join(SENTENCES * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "mine"),
        model_type=kind,
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return SentencePieceTokenizer(folder / "mine.model")


LLAMAS = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
TOKENIZERS = {
    "bytes": lambda folder: ByteTokenizer(),
    "json": json_tokenizer,
    "json with another end": lambda folder: JsonTokenizer(json_tokenizer(folder).file, "<s>"),
    "Llama's": lambda folder: sentencepiece_tokenizer(folder, "bpe", **LLAMAS),
    "BPE": lambda folder: sentencepiece_tokenizer(folder, "bpe", byte_fallback=True),
    "unigram": lambda folder: sentencepiece_tokenizer(folder, "unigram", byte_fallback=True),
    "unigram without prefix": lambda folder: sentencepiece_tokenizer(
        folder, "unigram", add_dummy_prefix=False
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_transformers_reads_the_tokenizer_that_was_trained_with(tmp_path, kind):
    tokenizer, folder = TOKENIZERS[kind](tmp_path), tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_for_transformers(tokenizer, folder, 77, tokenizer.eos_id, False, {})
    theirs, again = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in texts():
        ids = [int(i) for i in tokenizer.encode(text)]
        assert theirs(text).input_ids == ids
        assert [int(i) for i in again.encode(text)] == ids
        if tokenizer.decode(ids) == text:
            assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == again.eos_id == tokenizer.eos_id
    assert theirs.model_max_length == 77
    assert saved_identity(folder) == again.identity == tokenizer.identity
    save_for_transformers(tokenizer, folder, 77, tokenizer.bos_id, True, {})
    theirs, again = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in (*SENTENCES, ""):
        ids = [int(i) for i in tokenizer.encode(text)]
        assert theirs(text).input_ids == [tokenizer.bos_id, *ids]
        assert [int(i) for i in again.encode(text)] == ids
    assert (theirs.bos_token_id, again.bos_id) == (tokenizer.bos_id, tokenizer.bos_id)


def test_sentencepiece_models_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a BPE nor a unigram model"):
        save_for_transformers(sentencepiece_tokenizer(tmp_path, "char"), tmp_path, 77, 2, True, {})


PLAIN = {"scale_emb": 1.0, "scale_depth": None, "dim_model_base": None}
OF_FAMILIES = {
    "llama": PLAIN | {"qkv_bias": True, "o_bias": True},
    "qwen2": PLAIN | {"qkv_bias": True, "window": 20, "window_pattern": "fw"},
    "qwen3": PLAIN | {"qk_norm": True},
    "mistral": PLAIN | {"window": 20},
    "ministral": PLAIN | {"window": 20, "window_pattern": "fw"},
    "minicpm": {},
    "minicpm_sala": {"mixers": ("attention", "lightning", "lightning"), "attention_gate": True},
    "smollm3": PLAIN | {"rotary_pattern": "rrn"},
    "granite": {"softmax_scale": 0.2},
    "seed_oss": PLAIN | {"qkv_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned_trained_exported_and_sampled(family, tmp_path, capsys):
    """From a folder, whose type the export has again."""
    of_family = OF_FAMILIES[family] | {"max_position_embeddings": 61}
    config = dataclasses.replace(SMALL, family=family, **of_family)
    save_weights(tmp_path / "hf", config, initialized(config).state_dict())
    first = HFWeights(tmp_path / "hf")
    assert (first.config.family, first.config.residual_scale) == (
        family,
        pytest.approx(config.residual_scale, rel=1e-12),
    )
    planned = TrainConfig(init_from=str(tmp_path / "hf"), seq_len=4096)
    assert plan(planned, Cluster(1, H200.gib, H200), "torch").fits
    settings = make_settings(tmp_path)
    del settings["model"]
    options = {"init_from": str(tmp_path / "hf"), "allow_other_tokenizer": True, "steps": 2}
    assert train(settings, **options)
    folder = exported(tmp_path / "run", tmp_path / "out", "--keep-scalings")
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    trained = HFWeights(folder)
    assert trained.config == first.config
    assert not trained["norm.weight"].equal(first["norm.weight"])
    capsys.readouterr()
    line = ["--prompt", "def f", "--tokens", "9", "--temperature", "0"]
    generate_main(["--run", str(tmp_path / "run"), *line])
    generate_main(["--init-from", str(folder), *line])
    of_run, of_export = capsys.readouterr().out.splitlines()
    assert of_run == of_export
