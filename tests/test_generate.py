"""generate.py on weights of --init-from, in chunks and on several ranks."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from bmt_burst import SequenceParallel
from models.config import PRESETS
from models.huggingface import save_weights
from tests.launcher import run_script
from tests.refusals import refused_line
from tests.test_cache import WINDOWED
from tests.test_chunks import DENSE, NOPE, SPARSE, build, on_ranks
from tests.test_evaluate import TINY
from tests.test_model import initialized
from train import generate as script
from train.data.records import read_text
from train.data.tokenizer import JsonTokenizer
from train.generation.decoding import continue_text

PROMPT = "to be or not to be that is the question " * 3
VARIED = (
    "a quick brown fox jumps over the lazy dog while six wizards "
    "judge my vow of black quartz and pay me"
)
SALA = dataclasses.replace(
    SPARSE, mixers=("lightning", "attention", "lightning"), attention_rotary=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return weights that were not trained, with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("generate")
    words = {word: i for i, word in enumerate(("[UNK]", "</s>", " ", *map(chr, range(97, 123))))}
    backend = Backend(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    weights = {name: p.detach() for name, p in initialized(TINY).named_parameters()}
    save_weights(folder, TINY, weights, max_position_embeddings=512)
    (folder / "prompt.txt").write_text(PROMPT)
    return folder


def line(folder: Path, *more: object) -> list[str]:
    given = ("--init-from", folder, "--prompt-file", folder / "prompt.txt", "--temperature", 0)
    return [*map(str, (*given, "--tokens", 80, *more))]


def test_ranks_and_chunks_give_the_text_of_one_process(folder, capsys):
    script.main(line(folder))
    alone, said = capsys.readouterr()
    assert alone.startswith(PROMPT) and len(alone) > len(PROMPT) + 20
    speed = r"prefill of 120 tokens: [\d,.]+ tokens/s; decoding: [\d,.]+ ms a token\n"
    assert re.fullmatch(speed, said)
    script.main(line(folder, "--chunk", "0.0625K"))
    in_chunks, said = capsys.readouterr()
    assert in_chunks == alone
    assert re.fullmatch(speed, said)
    for tokens, expected in ((0, ""), (1, r"prefill of 120 tokens: [\d,.]+ tokens/s\n")):
        script.main(line(folder, "--tokens", tokens))
        assert re.fullmatch(expected, capsys.readouterr().err)
    ended, printed = run_script(2, "train/generate.py", *line(folder, "--chunk", 50))
    assert ended == 0, printed
    assert alone in printed and re.search(speed, printed)


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize("config", [DENSE, SALA, NOPE], ids=["dense", "lightning", "use_nope"])
def test_greedy_tokens_are_the_same_on_any_ranks(folder, config, chunk):
    """The prompt repeats no words, since by keys without positions equal blocks tie."""
    tokenizer, prompt = JsonTokenizer(folder / "tokenizer.json"), VARIED

    def choose(logits):
        """Choose the most likely letter, and never the end."""
        return 3 + int(logits[3:].argmax())

    @torch.inference_mode()
    def work(sp):
        model = build(config, sp)
        return continue_text(model, tokenizer, prompt, 25, choose, chunk=chunk)

    expected = work(SequenceParallel())
    assert len(set(expected[len(prompt) :])) > 2
    for size in (2, 3, 4) if config is DENSE else (3,):
        assert set(on_ranks(size, work)) == {expected}


def test_a_text_ends_where_the_folder_says(folder, tmp_path, capsys):
    """Also at tokens that are no end of a document. Options replace what the folder begins with."""
    released = shutil.copytree(folder, tmp_path / "released")
    more = ("--init-from", released, "--prompt-file", folder / "prompt.txt")
    script.main(line(folder, *more))
    answer = capsys.readouterr().out[len(PROMPT) : -1]
    letter = answer[len(answer) // 2]
    end = JsonTokenizer(folder / "tokenizer.json").id_of(letter)
    (released / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    script.main(line(folder, *more))
    assert capsys.readouterr().out[len(PROMPT) : -1] == answer[: answer.index(letter)]
    for bos, begun in (("none", 120), ("a", 121), ("auto", 120)):
        script.main(line(folder, *more, "--bos", bos, "--tokens", 1))
        assert f"prefill of {begun} tokens" in capsys.readouterr().err
    said = refused_line(capsys, script.main, *line(folder, *more, "--bos", "<none>"))
    assert f"--bos must be auto, none or a token of {released}'s tokenizer, got '<none>'" in said


def test_special_tokens_and_a_prompt_that_is_too_long_are_reported(folder, tmp_path, capsys):
    """Once, and not with --special. Rotary scaling extends the range."""
    prompt = "ask</s>tell" + "a" * 500
    given = ["--init-from", folder, "--prompt", prompt, "--temperature", 0, "--tokens", 2]
    script.main([*map(str, given)])
    text, said = capsys.readouterr()
    assert text.startswith("ask") and "</s>" not in text
    letters = (
        "the prompt spells special tokens, which are read as letters: </s>; --special reads them "
        "as tokens\n"
    )
    beyond = "the prompt's 511 tokens and --tokens 2 are beyond the 512 tokens that the model was"
    assert said.startswith(letters + beyond) and said.count("\n") == 3
    script.main([*map(str, given), "--special"])
    text, said = capsys.readouterr()
    assert text.startswith(prompt)
    assert said.startswith("prefill of 508 tokens") and said.count("\n") == 1
    scaled = shutil.copytree(folder, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config["rope_parameters"] |= rope
    (scaled / "config.json").write_text(json.dumps(config))
    script.main([*map(str, (*given, "--init-from", scaled))])
    assert capsys.readouterr().err.startswith(letters + "prefill of 511 tokens")


def test_a_prompt_may_have_fewer_tokens_than_ranks(folder, capsys):
    short = ["--init-from", folder, "--tokens", 5, "--temperature", 0]
    script.main([*map(str, short)])
    alone = capsys.readouterr().out
    ended, printed = run_script(2, "train/generate.py", *short)
    assert ended == 0, printed
    assert alone in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompt", "a"], "give --prompt or --prompt-file, got both"),
        (["--run", "runs"], "either --run or --init-from"),
        (["--chunk", 0], "--chunk must be at least 1, got 0"),
        (["--prompt", "\udce9"], "--prompt must be in UTF-8"),
        (["--processes", 0], "--processes must be at least 1, got 0"),
        (["--prompt-file", "/dev/null"], "expected a file, got /dev/null"),
        (["--tokens", 2**31 - 1], "not enough memory for the keys and values of 2,147,483,767"),
    ],
)
def test_wrong_options_are_refused_in_a_line(folder, capsys, more, message):
    with pytest.raises(SystemExit) as stopped:
        script.main(line(folder, *more))
    *before, printed = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert message in printed and all("beyond the 512 tokens" in x for x in before)


def test_a_prompt_file_is_read_as_training_data_is(folder, tmp_path, capsys):
    """With its line ends, without a byte order mark, and in UTF-8 only."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfto\r\nbe")
    assert read_text(file) == "to\r\nbe"
    file.write_bytes(b"to \xff")
    said = refused_line(capsys, script.main, *line(folder, "--prompt-file", file))
    assert f"{file}: not UTF-8: invalid start byte at byte 3" in said


@pytest.mark.parametrize(("ranks", "chunk"), [(1, None), (2, None), (2, 50)])
@pytest.mark.parametrize("config", [WINDOWED, NOPE, PRESETS["sala-tiny"]])
def test_logits_of_a_prompt_are_those_of_its_last_token(folder, config, ranks, chunk):
    tokenizer = JsonTokenizer(folder / "tokenizer.json")

    @torch.inference_mode()
    def work(sp):
        model, shapes = build(config, sp), []
        model.norm.register_forward_hook(lambda _, given, out: shapes.append(given[0].shape))
        continue_text(model, tokenizer, PROMPT, 2, lambda logits: 3, chunk=chunk)
        return shapes

    assert on_ranks(ranks, work) == [[(1, 1, config.hidden_size)] * 2] * ranks


def test_chunks_that_are_too_short_are_refused_once(folder):
    ended, printed = run_script(2, "train/generate.py", *line(folder, "--chunk", 1))
    assert ended == 2
    assert printed.count("a chunk of 1 of 120 tokens is too short for 2 ranks") == 1
