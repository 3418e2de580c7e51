"""One rank's training, in this process: evaluation, stages, messages, what it leaves when it cannot
go on.
"""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import pre_tokenizers

from bmt_burst import kernels
from models.huggingface import load_cpm, save_weights
from tests.live import changed
from tests.preparing import edit_index
from tests.runs import forget, newest, records, train, written_text
from tests.test_model import SMALL, initialized
from tests.test_sparse import SMALL as SPARSE
from train.base import ranks
from train.checkpoints import checkpoint
from train.data.batches import Batches
from train.data.tokenizer import ByteTokenizer, JsonTokenizer
from train.export import export_huggingface
from train.run.distributed import choose_engine
from train.settings.config import TrainConfig


def evaluating(monkeypatch, during) -> None:
    """Call `during()` before the second batch of each evaluation."""
    plain = Batches.of_evaluation

    def slowly(batches, data):
        for number, batch in enumerate(plain(batches, data)):
            if number == 1:
                during()
            yield batch

    monkeypatch.setattr(Batches, "of_evaluation", slowly)


def test_an_evaluation_reports_its_start_and_its_loss(settings, tmp_path, capsys):
    """Also that it is measured on the training data, through a link."""
    (tmp_path / "link").symlink_to("text")
    assert train(settings, val_data=str(tmp_path / "link"), eval_every=2)
    printed, warned = capsys.readouterr()
    assert "--val-data and --data are the same folder" in warned
    losses = records(tmp_path / "run", "val_loss")
    assert list(losses) == [2, 4]
    for step, loss in losses.items():
        assert f"step {step}: saved {tmp_path}/run/step_{step:08d} in " in printed
        began = printed.index(f"step {step}: evaluating on {tmp_path}/link")
        assert began < printed.index(f"step {step}: validation loss {loss:.4f}, in ")
    few = {"steps": 1, "warmup_steps": 0, "decay_steps": 0, "eval_sequences": 1}
    named = {"val_data": {"x": str(tmp_path / "other")}, "output": str(tmp_path / "few")}
    assert train(settings, **few, **named, eval_tasks="positions")
    targets = r" \d\.\d{4} \(of only \d\d targets\), "
    printed = capsys.readouterr().out
    assert re.search(f"step 1: validation loss{targets}val_loss/x{targets}in ", printed)
    assert re.search(r"step 1: far_loss \d\.\d{4} \(of only \d targets?\), in ", printed)


def test_an_evaluation_that_a_signal_stopped_is_made_up_for(settings, tmp_path, monkeypatch):
    """At a step that is saved anyway, at one that is not, and at the last one."""
    options = {"val_data": settings["data"], "eval_every": 1, "steps": 4, "resume": "auto"}
    train(settings, **options, output=str(tmp_path / "whole"))
    for step in (2, 3, 4):
        stop, seen = SimpleNamespace(received=False), []

        # the second evaluation of each run; one that was stopped is its first
        def during(stop=stop, seen=seen):
            seen.append(None)
            stop.received = len(seen) == 2

        with monkeypatch.context() as patch:
            evaluating(patch, during)
            assert not train(settings, stop, **options)
        assert checkpoint.newest(tmp_path / "run").name == f"step_{step:08d}"
        assert list(records(tmp_path / "run", "val_loss")) == list(range(1, step))
    for _ in ("gone on with", "done"):
        assert train(settings, **options)
        for name in ("loss", "val_loss"):
            assert records(tmp_path / "run", name) == records(tmp_path / "whole", name)
        written = (tmp_path / "run/metrics.jsonl").read_text()
        assert written.count("val_loss") == 4


def test_a_run_that_is_told_to_stop_before_its_first_step_takes_none(settings, tmp_path):
    assert not train(settings, SimpleNamespace(received=True))
    assert not checkpoint.listed(tmp_path / "run")
    assert not records(tmp_path / "run")


def test_the_curve_is_drawn_at_each_save(settings, monkeypatch):
    drawn = []
    monkeypatch.setattr("train.loop.metrics.plot_losses", lambda rows, _: drawn.append(len(rows)))
    assert train(settings, save_every=2)
    assert drawn == [2, 4]


def test_a_new_stage_keeps_weights_and_optimizer_and_counts_anew(settings, tmp_path, capsys):
    """Other text, twice the length, other rotary positions, a schedule of its own; stopped and
    resumed as any run.
    """
    scaling = {"kind": "dynamic", "factor": 2.0, "original_length": 61}
    train(settings)
    first = newest(tmp_path / "run")
    stage = settings | {"data": str(tmp_path / "other"), "seq_len": 122, "steps": 3, "lr": 1e-30}
    stage |= {"rope_theta": 5e5, "rope_scaling": scaling, "warmup_steps": 0, "decay_steps": 0}
    stage |= {"new_stage": True, "output": str(tmp_path / "stage")}
    capsys.readouterr()
    assert train(stage, resume=str(first.path))
    printed = capsys.readouterr()
    assert f"a new stage from {first.path}" in printed.out
    jump = "the learning rate jumps: 1.500e-04 at the checkpoint's step 4, 1.000e-30 at step 1"
    assert jump in printed.err
    second = newest(tmp_path / "stage")
    counts = [second.state[name] for name in ("step", "samples", "optimizer_steps")]
    assert counts == [3, 6, 7]
    assert second.state["model"] == SMALL.to_dict() | {"rope_theta": 5e5, "rope_scaling": scaling}
    for name, weight in first.weights().items():
        assert torch.allclose(second.weights()[name], weight, atol=1e-12)
    losses = records(tmp_path / "stage")
    forget(tmp_path / "stage", 3)
    assert train(stage, resume="auto")
    assert "resumed after step 2" in capsys.readouterr().out
    assert records(tmp_path / "stage") == losses
    assert list(losses) == [1, 2, 3]


def made_for(longest: int) -> str:
    """Return a model's JSON file whose weights were made for so many tokens."""
    return json.dumps(SMALL.to_dict() | {"max_position_embeddings": longest})


def test_sequences_longer_than_the_model_was_made_for_give_a_warning(settings, tmp_path, capsys):
    """It names only options that were not given."""
    warning = "--seq-len 61 is beyond the 60 tokens that the model was made for"
    scaling = {"kind": "yarn", "factor": 1.5, "original_length": 40}
    for number, (longest, options, advice) in enumerate(
        (
            (60, {}, ": see --rope-theta and --rope-scaling"),
            (61, {}, None),
            (40, {"rope_scaling": scaling}, ": see --rope-theta"),
            (40, {"rope_scaling": scaling, "rope_theta": 2e4}, ""),
        )
    ):
        (tmp_path / "model.json").write_text(made_for(longest))
        train(settings, output=str(tmp_path / f"run-{number}"), steps=2, **options)
        printed = capsys.readouterr().err.splitlines()
        assert (f"{warning}{advice}" in printed) == (advice is not None)


def test_stages_keep_the_longest_row_and_what_the_model_was_made_for(settings, tmp_path):
    """Also where a later stage is shorter, and a checkpoint of before knows neither."""
    shape = tmp_path / "model.json"
    shape.write_text(made_for(131_072))
    train(settings, seq_len=122, steps=2)
    shape.write_text(json.dumps(SMALL.to_dict()))
    path = checkpoint.newest(tmp_path / "run")
    train(settings, resume=str(path), new_stage=True, steps=2, output=str(tmp_path / "stage"))
    for _ in ("begun", "gone on with"):
        state = newest(tmp_path / "stage").state
        assert (state["longest_row"], state["model"]["max_position_embeddings"]) == (122, 131_072)
        train(settings, resume="auto", steps=4, output=str(tmp_path / "stage"))

    def forget_lengths(state) -> None:
        del state["longest_row"], state["model"]["max_position_embeddings"]

    changed_state(path, forget_lengths)
    shape.write_text(made_for(131_072))
    assert train(settings, seq_len=122, resume="auto")
    state = newest(tmp_path / "run").state
    assert (state["longest_row"], state["model"]["max_position_embeddings"]) == (122, 131_072)


def test_a_new_stage_may_attend_sparsely(settings, tmp_path, capsys):
    """As MiniCPM4 was trained: dense at first, then sparse on longer sequences."""
    sparse = SPARSE.to_dict()
    train(settings)
    path = checkpoint.newest(tmp_path / "run")
    stage = {"resume": str(path), "output": str(tmp_path / "stage"), "seq_len": 122}
    capsys.readouterr()
    assert train(settings, **stage, new_stage=True, sparse=sparse)
    assert "sparse attention to 5 blocks of 4 tokens" in capsys.readouterr().out
    state = newest(tmp_path / "stage").state
    assert state["model"] == SMALL.to_dict() | {"sparse": sparse}
    assert train(settings, **stage | {"output": str(tmp_path / "dense")}, new_stage=True)
    losses, dense = records(tmp_path / "stage"), records(tmp_path / "dense")
    assert losses.keys() == dense.keys()
    assert losses != dense
    with pytest.raises(ranks.RankError, match=r"another model: --sparse .* -> None"):
        train(settings, **stage | {"resume": "auto"}, new_stage=True)
    with pytest.raises((ranks.RankError, ValueError), match="--sparse: expected topk of at least"):
        train(settings, sparse={"topk": 1})


def test_what_is_no_stage_is_refused(settings, tmp_path, capsys):
    """Only a new stage changes data, positions, windows, documents and begin tokens."""
    train(settings, window=8)
    path = checkpoint.newest(tmp_path / "run")
    other = {"resume": str(path), "output": str(tmp_path / "stage"), "window": 8}
    option = "give --new-stage to start another stage from its weights and optimizer"
    scaling = {"kind": "linear", "factor": 2}
    read, holds = "was reading other data: ", "holds another model: "
    auto = {"new_stage": True, "resume": "auto"}
    mask = r"--documents mask -> ignore, --bos <\|endoftext\|> -> none"
    for change, message in (
        ({"data": str(tmp_path / "other")}, f"{read}.*digest .*{option}"),
        ({"seq_len": 122}, f"{read}--seq-len 61 -> 122; {option}"),
        ({"documents": "ignore"}, f"{read}{mask}; {option}"),
        ({"bos": "none"}, rf"{read}--bos <\|endoftext\|> -> none; {option}"),
        ({"bos": "<s>"}, r"--bos must be auto, none or a token of .*text's tokenizer, got '<s>'"),
        ({"rope_theta": 5e5}, f"{holds}--rope-theta 10000.0 -> 500000.0; {option}"),
        ({"rope_scaling": scaling}, f"--rope-scaling None -> .*'linear'.*; {option}"),
        ({"window": 9}, f"{holds}--window 8 -> 9; {option}"),
        ({"window": None}, f"{holds}--window 8 -> None; {option}"),
        ({"model": "cpm-tiny", "new_stage": True}, f"{holds}vocab_size"),
        ({"new_stage": True, "output": settings["output"]}, "give --resume auto to continue their"),
        (auto, "has no checkpoint of a stage yet: give --resume CHECKPOINT"),
    ):
        with pytest.raises(ranks.RankError, match=message):
            train(settings, **other | change)
    with pytest.raises(ValueError, match="--new-stage needs the checkpoint to start from"):
        TrainConfig(new_stage=True)
    capsys.readouterr()
    stage = {"resume": str(path), "new_stage": True, "output": str(tmp_path / "stage")}
    assert train(settings, **stage, documents="ignore")
    changed = (
        "--window 8 -> None, --documents mask -> ignore, --bos <|endoftext|> -> none, "
        "--layout balanced -> zigzag"
    )
    assert f"changed since the checkpoint: {changed}" in capsys.readouterr().err
    forget(tmp_path / "stage", 4)
    with pytest.raises(ranks.RankError, match="was reading other data: --documents ignore -> mask"):
        train(settings, documents="mask", resume="auto", output=str(tmp_path / "stage"))
    assert train(settings, resume="auto", output=str(tmp_path / "stage"))


def changed_state(path, change) -> None:
    """Rewrite the state of a checkpoint, as an older version of this program would have it."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = checkpoint._describe_file(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_of_a_newer_version_is_refused(settings, tmp_path):
    train(settings, steps=2)
    path = tmp_path / "run/step_00000002"
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace('"format": 1', '"format": 2'))
    with pytest.raises(ranks.RankError, match="expected a manifest of format 1, got 2"):
        train(settings, resume="auto")
    assert path.exists()  # it may be whole


def as_of_before(state) -> None:
    """Remove what older versions did not store, and add a machine's constants, which they did."""
    state["machine"] = "a GPU 1 2"
    del state["data"]["documents"], state["data"]["bos"]
    for name in ("documents", "bos", "window", "strategy", "ulysses_size", "log_every"):
        del state["config"][name]
    for name in ("window", "window_pattern"):
        del state["model"][name]
    state["config"]["layout"] = "zigzag"


def test_documents_are_apart_unless_a_resumed_run_joined_them(settings, tmp_path, capsys):
    """A checkpoint of a version that did not know of documents goes on as it was. Whole texts get
    no begin token.
    """
    train(settings, documents="ignore", steps=4)
    expected = records(tmp_path / "run")
    assert "begin token" not in "".join(capsys.readouterr())
    forget(tmp_path / "run", 4)
    changed_state(tmp_path / "run/step_00000002", as_of_before)
    assert train(settings, resume="auto")
    printed = capsys.readouterr()
    assert "documents not kept apart, resumed after step 2" in printed.out
    assert "changed since" not in printed.err
    assert records(tmp_path / "run") == expected
    assert not records(tmp_path / "run", "documents")
    train(settings, output=str(tmp_path / "new"))
    assert "documents kept apart" in capsys.readouterr().out
    assert records(tmp_path / "new") != expected
    assert min(records(tmp_path / "new", "documents").values()) > 2
    assert set(records(tmp_path / "new", "balance").values()) == {1.0}


def test_all_texts_have_begin_tokens_which_resumed_runs_keep(settings, tmp_path, capsys):
    """The same as by name; others than without; bit for bit as if it had not stopped, also with
    windows.
    """
    options = {"val_data": str(tmp_path / "other"), "eval_every": 2, "window": 8}
    names = ("loss", "grad_norm", "val_loss", "documents", "balance")
    train(settings, **options)
    expected = [records(tmp_path / "run", name) for name in names]
    shown = "documents kept apart, each after begin token 256"
    printed, warned = capsys.readouterr()
    assert (printed.count(shown), warned) == (2, "")
    forget(tmp_path / "run", 4)
    assert train(settings, **options, resume="auto")
    assert [records(tmp_path / "run", name) for name in names] == expected
    train(settings, **options, bos="<|endoftext|>", output=str(tmp_path / "named"))
    assert [records(tmp_path / "named", name) for name in names] == expected
    train(settings, **options, bos="none", output=str(tmp_path / "without"))
    without = [records(tmp_path / "without", name) for name in names]
    assert all(without[i][step] != expected[i][step] for i in (0, 2) for step in expected[i])


def test_the_strategy_may_change_on_resume(settings, tmp_path, capsys):
    train(settings, steps=2, decay_steps=0)
    assert ", strategy" not in capsys.readouterr().out
    options = {"strategy": "usp", "ulysses_size": 1, "log_every": 1}
    assert train(settings, **options, resume="auto", decay_steps=0)
    out, err = capsys.readouterr()
    assert "1 sequence parallel rank, strategy usp; 2 sequences of 61 tokens a step; " in out
    changes = "checkpoint: --strategy auto -> usp, --ulysses-size None -> 1, --steps 2 -> 4\n"
    assert changes in err
    assert all(f"step {step}/4: " in out for step in (3, 4))
    assert TrainConfig(ulysses_size=1).attention["strategy"] == "usp"


def test_a_kernel_that_is_not_deterministic_is_refused_at_once(settings, tmp_path, monkeypatch):
    def refuses(spec, q, k):
        return "its backward adds up in no fixed order" if spec.deterministic else None

    monkeypatch.setattr(kernels.load("reference"), "refuses", refuses)
    refused = r"--flash reference: no kernel .* adds up in no fixed order"
    with pytest.raises(ranks.RankError, match=refused):
        train(settings, flash="reference", deterministic=True)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def theirs(tmp_path) -> JsonTokenizer:
    """A tokenizer with as many tokens as there are bytes, in another order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["</s>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "theirs.json"))
    return JsonTokenizer(tmp_path / "theirs.json", "</s>")


def forget_identity(folder) -> None:
    """Make a folder one of an older version, which did not save a tokenizer's identity."""
    spec = json.loads((folder / "tokenizer.spec.json").read_text())
    (folder / "tokenizer.spec.json").write_text(
        json.dumps({"kind": spec["kind"], "file": spec["file"]}) + "\n"
    )
    edit_index(folder, "tokenizer.spec.json")


def test_data_of_another_tokenizer_neither_validates_nor_starts_a_stage(settings, theirs, tmp_path):
    other = str(written_text(tmp_path / "theirs", theirs))
    mine, their_id = ByteTokenizer().identity[:12], theirs.identity[:12]
    refused = f"theirs has another tokenizer than .*text: expected {mine}, got {their_id}"
    with pytest.raises(ranks.RankError, match=refused):
        train(settings, val_data=other)
    train(settings)
    first = str(checkpoint.newest(tmp_path / "run"))
    stage = {"resume": first, "new_stage": True, "output": str(tmp_path / "stage")}
    refused = f"step_00000004 has another tokenizer than .*theirs: expected {their_id}, got {mine}"
    with pytest.raises(ranks.RankError, match=refused):
        train(settings, **stage, data=other)
    assert train(settings, **stage, data=str(tmp_path / "other"), val_data=settings["data"])


def test_folders_without_an_identity_are_used_with_a_warning(settings, theirs, tmp_path, capsys):
    """Validation data, training data, and a checkpoint. Sizes of vocabularies are compared."""
    warning = "has no identity of its tokenizer: only the size of the vocabulary is checked\n"
    other = written_text(tmp_path / "theirs", theirs)
    forget_identity(other)
    assert train(settings, val_data=str(other))
    assert capsys.readouterr().err.count(f"{other} {warning}") == 1
    forget_identity(tmp_path / "text")
    assert train(settings, val_data=str(tmp_path / "other"), resume="auto", steps=6)
    # against the validation data, and against the checkpoint
    assert capsys.readouterr().err.count(f"{tmp_path / 'text'} {warning}") == 2
    first = checkpoint.newest(tmp_path / "run")
    for file in (first / "tokenizer").iterdir():
        file.unlink()
    manifest = json.loads((first / "manifest.json").read_text())
    entries = manifest["files"].items()
    manifest["files"] = {name: x for name, x in entries if not name.startswith("tokenizer/")}
    (first / "manifest.json").write_text(json.dumps(manifest))
    stage = {"resume": str(first), "new_stage": True, "output": str(tmp_path / "stage")}
    assert train(settings, **stage, data=str(tmp_path / "other"))
    assert capsys.readouterr().err.count(f"{first} {warning}") == 1
    small = changed(SMALL, vocab_size=256)
    (tmp_path / "model.json").write_text(json.dumps(small.to_dict()))
    with pytest.raises(ranks.RankError, match="has a vocabulary of 257 tokens"):
        train(settings, val_data=str(other), output=str(tmp_path / "small"))


def started(settings, source, output, **options) -> bool:
    """Take a step from weights with the shape of SMALL. Return whether it was taken."""
    options = {"steps": 1, "warmup_steps": 0, "decay_steps": 0, "output": str(output)} | options
    return train(settings, init_from=str(source), **options)


def test_weights_of_another_tokenizer_need_to_be_allowed(settings, theirs, tmp_path, capsys):
    """Exported weights have an identity. Others have a file under the name that all know."""
    mine, source, plain = tmp_path / "text", tmp_path / "hf", tmp_path / "plain"
    other = written_text(tmp_path / "theirs", theirs)
    train(settings)
    exported = newest(tmp_path / "run")
    source.mkdir()
    export_huggingface(exported, ByteTokenizer(), source, torch.float32, keep_scalings=False)
    assert started(settings, source, tmp_path / "1")
    theirs_id, my_id = theirs.identity[:12], ByteTokenizer().identity[:12]
    refused = (
        f"hf has another tokenizer than .*theirs: expected {theirs_id}, got {my_id} as it "
        "was exported, .* of tokenizer.json; give data .*, or --allow-other-tokenizer"
    )
    with pytest.raises(ranks.RankError, match=refused):
        started(settings, source, tmp_path / "2", data=str(other))
    capsys.readouterr()
    allowed = {"data": str(other), "allow_other_tokenizer": True}
    assert started(settings, source, tmp_path / "2", **allowed)
    assert "hf has another tokenizer than" in capsys.readouterr().err
    assert started(settings, source, tmp_path / "2", **allowed | {"resume": "auto", "steps": 2})

    save_weights(plain, SMALL, initialized(SMALL).state_dict())
    assert started(settings, plain, tmp_path / "3")
    assert "plain has no identity of its tokenizer: only" in capsys.readouterr().err
    (plain / "tokenizer.json").write_bytes(theirs.file.read_bytes())
    assert started(settings, plain, tmp_path / "4", data=str(other))
    assert "identity" not in capsys.readouterr().err
    refused = f"plain has another tokenizer than {mine}: expected {my_id}"
    with pytest.raises(ranks.RankError, match=refused):
        started(settings, plain, tmp_path / "5")
    (plain / "tokenizer.json").write_text("{}")
    with pytest.raises(ranks.RankError, match=r"got cannot read tokenizer .*plain/tok"):
        started(settings, plain, tmp_path / "6", data=str(other))
    with pytest.raises(ValueError, match="--allow-other-tokenizer needs --init-from"):
        TrainConfig(allow_other_tokenizer=True)


def test_weights_that_start_with_the_default_rate_give_a_warning(settings, tmp_path, capsys):
    save_weights(tmp_path / "hf", SMALL, initialized(SMALL).state_dict())
    warning = "--lr 0.001 is the default, which is for tiny models"
    for lr, options, count in (
        (1e-3, {}, 1),
        (1e-3, {"resume": "auto", "steps": 2}, 0),
        (1e-4, {}, 0),
    ):
        assert started(settings, tmp_path / "hf", tmp_path / f"{lr:g}", lr=lr, **options)
        assert capsys.readouterr().err.count(warning) == count


def extended(folder: Path, tokens: list[str]) -> JsonTokenizer:
    """A tokenizer of single characters, with more tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="<unk>"))
    backend.add_special_tokens(["<|endoftext|>", "<unk>"])
    backend.add_tokens([*map(chr, range(32, 127)), "\n", *tokens])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.fixture
def other_shape(settings, tmp_path) -> dict:
    """Return options without a model, and weights of another vocabulary and shape as init_from."""
    words = [f"<{i}>" for i in range(300)]
    tokenizer = extended(tmp_path / "many", words)
    shape = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size, num_layers=1)
    save_weights(tmp_path / "hf", shape, initialized(shape).state_dict())
    (tmp_path / "hf/tokenizer.json").write_bytes(tokenizer.file.read_bytes())
    data = written_text(tmp_path / "theirs", tokenizer)
    del settings["model"]
    return settings | {"data": str(data), "init_from": str(tmp_path / "hf")}


def test_a_checkpoint_brings_its_model(other_shape, tmp_path, capsys):
    """Also a head of its own, and positions that were given when the run began."""
    own = {"untie": True, "rope_theta": 2e4}
    train(other_shape, **own)
    begun, whole = other_shape | own, records(tmp_path / "run")
    alone = {name: value for name, value in other_shape.items() if name != "init_from"}
    path, model = newest(tmp_path / "run").path, newest(tmp_path / "run").state["model"]
    (tmp_path / "same.json").write_text(json.dumps(model))
    capsys.readouterr()
    for options in (alone, alone | {"rope_theta": 2e4, "untie": True}, begun):
        forget(tmp_path / "run", 4)
        assert train(options, resume="auto")
        assert records(tmp_path / "run") == whole
    assert train(alone | {"model": str(tmp_path / "same.json")}, resume=str(path))
    assert "changed since" not in capsys.readouterr().err
    stage = alone | {"resume": str(path), "new_stage": True, "seq_len": 122}
    assert train(stage, output=str(tmp_path / "stage"))
    assert capsys.readouterr().err.startswith("changed since the checkpoint: --seq-len 61 -> 122")
    assert newest(tmp_path / "stage").state["model"] == model
    assert train(stage, output=str(tmp_path / "theta"), rope_theta=5e4)
    assert "--rope-theta 20000.0 -> 50000.0" in capsys.readouterr().err
    assert newest(tmp_path / "theta").state["model"] == model | {"rope_theta": 5e4}
    resumed = TrainConfig(resume="auto", output=str(tmp_path / "run"))
    for step, state in ((4, "{"), (2, "[]")):  # an older one is read, else an error names it
        assert resumed.model_config().to_dict() == model
        (tmp_path / f"run/step_{step:08d}/state.json").write_text(state)
    with pytest.raises(ValueError, match="step_00000002 holds an unknown model"):
        resumed.model_config()
    (tmp_path / "run/step_00000002/state.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="step_00000002 is not a whole checkpoint"):
        resumed.model_config()


def test_a_model_beside_a_checkpoint_must_agree_with_it(other_shape, tmp_path):
    """Whatever names it: the error has both values, and no advice that would ruin the run."""
    train(other_shape, steps=2)
    alone = {name: value for name, value in other_shape.items() if name != "init_from"}
    size = newest(tmp_path / "run").state["model"]["vocab_size"]
    checkpoint_options = {"resume": str(tmp_path / "run/step_00000002"), "new_stage": True}
    preset = rf"another model: vocab_size {size} -> 320, .*; leave out --model cpm-tiny to continue"
    stage = alone | checkpoint_options | {"output": str(tmp_path / "stage")}
    other = initialized(SMALL)
    save_weights(tmp_path / "other", SMALL, other.state_dict())
    for options, message in (
        (alone | {"resume": "auto", "model": "cpm-tiny"}, preset),
        (stage | {"model": "cpm-tiny"}, preset),
        (stage | {"model": "cpm-ant-tiny"}, "another model: model_type cpm -> cpm-ant; leave out"),
        (stage | {"init_from": str(tmp_path / "other")}, "; leave out --init-from .*other to cont"),
        (stage | {"init_from": "gone"}, "gone does not exist; leave out --init-from to continue"),
        (stage | {"untie": True}, "another model: tie_embeddings True -> False; leave out --untie"),
        (alone | {"resume": "auto", "rope_theta": 5e4}, r"10000.0 -> 50000.0; give --new-stage"),
        (alone | {"output": str(tmp_path / "new")}, "only 320: give --model, or a folder as --in"),
        (alone, "run has checkpoints: give --resume auto to resume, or another --output$"),
        (stage | {"resume": "auto"}, "has no checkpoint of a stage yet: give --resume CHECKPOINT"),
    ):
        with pytest.raises(ranks.RankError, match=message):
            train(options)
    assert not (tmp_path / "stage").exists()


def test_a_vocabulary_grows_with_the_tokenizer_of_the_data(settings, tmp_path, capsys):
    """Then the run resumes, and its export has the new tokens."""
    old, new = extended(tmp_path / "old", []), extended(tmp_path / "new", ["<call>", "<end>"])
    shape = dataclasses.replace(SMALL, vocab_size=old.vocab_size, tie_embeddings=False)
    weights = initialized(shape).state_dict()
    save_weights(tmp_path / "hf", shape, weights)
    (tmp_path / "hf/tokenizer.json").write_bytes(old.file.read_bytes())
    data = written_text(tmp_path / "more", new)
    with pytest.raises(ranks.RankError) as refused:
        started(settings, tmp_path / "hf", tmp_path / "1", data=str(data))
    size = f"vocabulary of {new.vocab_size} tokens, but --init-from {tmp_path}/hf has only "
    assert f"{size}{old.vocab_size}: " in str(refused.value)
    assert "--grow-vocabulary adds rows for new tokens" in str(refused.value)
    assert "--model" not in str(refused.value)
    grow = {"data": str(data), "grow_vocabulary": True, "lr": 1e-30, "weight_decay": 0.0}
    assert started(settings, tmp_path / "hf", tmp_path / "2", **grow)
    printed = capsys.readouterr().err
    assert f"embed_tokens.weight grows from {old.vocab_size} to {new.vocab_size} rows" in printed
    assert "tokenizer" not in printed
    assert started(settings, tmp_path / "hf", tmp_path / "2", **grow, resume="auto", steps=2)
    assert capsys.readouterr().err == "changed since the checkpoint: --steps 1 -> 2\n"
    saved = newest(tmp_path / "2")
    (tmp_path / "out").mkdir()
    export_huggingface(saved, new, tmp_path / "out", torch.float32, keep_scalings=True)
    exported = load_cpm(tmp_path / "out")
    assert exported.config.vocab_size == new.vocab_size == old.vocab_size + 2
    for name in ("embed_tokens.weight", "lm_head.weight"):
        rows = exported.state_dict()[name]
        assert torch.allclose(rows[:-2], weights[name], atol=1e-6)
    other = extended(tmp_path / "other-one", ["<end>", "<call>"])
    (tmp_path / "hf/tokenizer.json").write_bytes(other.file.read_bytes())
    with pytest.raises(ranks.RankError, match="does not have all its tokens under the same ids"):
        started(settings, tmp_path / "hf", tmp_path / "3", **grow)
    with pytest.raises(ValueError, match="--grow-vocabulary needs --init-from"):
        TrainConfig(grow_vocabulary=True)


def test_a_head_beside_tied_embeddings_is_trained_with_untie(settings, tmp_path):
    """A file and a folder: the loss of the first step is that of the model with its own head."""
    untied = dataclasses.replace(SMALL, tie_embeddings=False)
    weights = initialized(untied).state_dict()
    save_weights(tmp_path / "hf", SMALL, weights)
    torch.save(weights, tmp_path / "w.pt")
    (tmp_path / "untied.json").write_text(json.dumps(untied.to_dict()))
    for name in ("hf", "w.pt"):
        with pytest.raises(ranks.RankError, match=r"differs from the embeddings .*give --untie"):
            started(settings, tmp_path / name, tmp_path / f"{name}-0")
        assert started(settings, tmp_path / name, tmp_path / f"{name}-1", untie=True)
    own = {"model": str(tmp_path / "untied.json")}
    assert started(settings | own, tmp_path / "w.pt", tmp_path / "own")
    [expected] = records(tmp_path / "own").values()
    assert [records(tmp_path / f"{x}-1") for x in ("hf", "w.pt")] == [{1: expected}] * 2
    with pytest.raises(ranks.RankError, match=r"--untie with --model .*untied.json: expected a"):
        started(settings | own, tmp_path / "w.pt", tmp_path / "2", untie=True)


def test_a_resumed_run_does_not_overwrite_newer_checkpoints(settings, tmp_path, capsys):
    """A damaged one does not count. A branch has its own output."""
    train(settings)
    older, run = str(tmp_path / "run/step_00000002"), tmp_path / "run"
    with pytest.raises(ranks.RankError, match="checkpoints that"):
        train(settings, resume=older)
    assert train(settings, resume=older, output=str(tmp_path / "branch"), lr=0.001)
    assert "changed since the checkpoint: --lr 0.003 -> 0.001" in capsys.readouterr().err
    assert list(records(tmp_path / "branch")) == [3, 4]
    newest = run / "step_00000004/state.json"
    newest.write_text(newest.read_text()[:100])
    assert train(settings, resume=older)
    assert "step_00000004 is damaged" in capsys.readouterr().err
    assert [path.name for path in checkpoint.listed(run)] == ["step_00000004", "step_00000002"]
    train(settings, resume="auto", steps=3)
    assert "there is nothing to do: step 4 of 3 is done" in capsys.readouterr().out
    newest.write_text(newest.read_text().replace("10000.0", "90000.0"))
    with pytest.raises(ranks.RankError, match="step_00000002 holds another model: --rope-theta"):
        train(settings, resume="auto", model=None)


def test_wrong_runs_are_refused(settings, tmp_path):
    (tmp_path / "junk.pt").write_text("junk")
    (tmp_path / "cut.json").write_text('{"hid')
    for options, message in (
        ({"data": "nowhere"}, "nowhere has no index.json"),
        ({"init_from": str(tmp_path / "junk.pt")}, "junk.pt is not a file of weights"),
        ({"model": str(tmp_path / "cut.json")}, "cut.json: Unterminated string"),
        ({"seq_len": 10_000}, "less than half of a sequence of 10,000"),
        ({"resume": "nowhere"}, "there is no checkpoint in nowhere"),
        ({"flash": "cuda"}, "--flash cuda: no kernel for"),
    ):
        with pytest.raises((ranks.RankError, ValueError), match=message):
            train(settings, **options, output=str(tmp_path / "wrong"))
    for options, message in (
        ({"engine": "bmtrain"}, "--engine bmtrain needs GPUs and the package bmtrain"),
        ({"dtype": "fp16"}, "need --engine bmtrain"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_engine(TrainConfig(**options), torch.device("cpu"))
