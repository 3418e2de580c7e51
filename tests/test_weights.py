"""Weights to start from: which files of a folder are read, and how others are refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import CPMConfig
from models.cpm import CPM
from models.cpm_bee import CPMBee
from models.cpm_live.config import HF_FIELDS
from models.cpm_live.config import PRESETS as LIVE
from models.huggingface import HFWeights, save_weights
from models.weights import Expected
from tests.test_model import SMALL, initialized
from train.checkpoints.weights import load_weights
from train.data.tokenizer import open_tokenizer
from train.engine import Shard
from train.settings.config import TrainConfig

INDEX = "model.safetensors.index.json"
LLAMA = dataclasses.replace(
    SMALL, scale_emb=1.0, scale_depth=None, dim_model_base=None, tie_embeddings=False
)
LLAMA_ALIKE = dataclasses.replace(LLAMA, num_kv_heads=4, rms_norm_eps=1e-6, init_std=0.02)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return initialized(SMALL).state_dict()


@pytest.fixture
def folder(tmp_path, weights) -> Path:
    """A model in one file."""
    save_weights(tmp_path / "hf", SMALL, weights)
    return tmp_path / "hf"


def divide(folder: Path, place: Callable, save: Callable = torch.save) -> dict[str, str]:
    """Put the weights of a folder into the files that place(name) names. Return the places."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: place(name) for name in whole}
    for file in set(places.values()):
        save({name: whole[name] for name in whole if places[name] == file}, folder / file)
    return places


@pytest.fixture
def sharded(folder) -> Path:
    """Return the same model in two files with their index."""
    file = "model-0000{}-of-00002.safetensors"
    write_index(folder, divide(folder, lambda name: file.format(1 + len(name) % 2), save_file))
    return folder


def write_index(folder: Path, places: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def places_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def holds(folder: Path, weights: dict[str, Tensor]) -> bool:
    read = HFWeights(folder)
    return read.keys() == weights.keys() and all(
        read[name].equal(weight) for name, weight in weights.items()
    )


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as refused:
        HFWeights(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_only_files_that_an_index_names_are_read(sharded, weights):
    """A weight in two shards is read where the index has it."""
    first = sharded / "model-00001-of-00002.safetensors"
    changed = {name: weight + 1 for name, weight in load_file(first).items()}
    for leftover in ("model-00000-of-00009", "zz"):
        save_file(changed, sharded / f"{leftover}.safetensors")
    name, place = next(iter(places_of(sharded).items()))
    [other] = set(places_of(sharded).values()) - {place}
    save_file({**load_file(sharded / other), name: torch.zeros(1)}, sharded / other)
    assert holds(sharded, weights)


def test_a_whole_file_beside_an_index_of_others_is_refused(sharded, weights):
    """transformers reads the whole file. Pickled files beside it are common, and are not read."""
    named = {f"model.{name}": weight + 1 for name, weight in weights.items()}
    save_file(named, sharded / "model.safetensors")
    message = refusal(sharded)
    assert "has two sources of weights, model.safetensors and model-00001-of-00002.saf" in message
    assert f"delete model.safetensors, or {INDEX} and the files that it names" in message
    for shard in sharded.glob("model-*"):
        shard.unlink()
    message = refusal(sharded)
    first = f"{INDEX} names model-00001-of-00002.safetensors, which {sharded} lacks"
    assert f"{first}, and not model.safetensors, which is whole: delete {INDEX} to" in message
    whole = (sharded / "model.safetensors").read_bytes()
    (sharded / "model.safetensors").write_bytes(whole[:-9])
    assert "model.safetensors: " in refusal(sharded) and "is whole" not in refusal(sharded)
    (sharded / "model.safetensors").unlink()
    assert refusal(sharded).endswith(first)
    (sharded / INDEX).unlink()
    (sharded / "model.safetensors").write_bytes(whole)
    (sharded / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "b.bin"}}')
    torch.save({}, sharded / "pytorch_model-00001-of-00002.bin")
    assert holds(sharded, {name: weight + 1 for name, weight in weights.items()})


def test_a_missing_file_of_several_is_named_by_the_numbers_of_the_others(sharded):
    (sharded / INDEX).unlink()
    (sharded / "model-00002-of-00002.safetensors").rename(sharded / "away")
    message = "hf lacks model-00002-of-00002.safetensors: expected 2 such files, got 1"
    assert message in refusal(sharded)
    torch.save({}, sharded / "pytorch_model-00000-of-00003.bin")
    (sharded / "model-00001-of-00002.safetensors").unlink()
    assert "hf lacks pytorch_model-00001-of-00003.bin: expected 3 such" in refusal(sharded)


def test_pointers_of_git_lfs_are_named(sharded, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4978265800\n"
    for name in ("model-00002-of-00002.safetensors", "x.bin", "tokenizer.json", "tokenizer.model"):
        (sharded / name).write_text(pointer)
    assert "00002.safetensors is a pointer of git-lfs, expected the file" in refusal(sharded)
    for name in ("tokenizer.json", "tokenizer.model"):
        with pytest.raises(ValueError, match=f"{name} is a pointer of git-lfs, .* git lfs pull"):
            open_tokenizer(str(sharded / name))
    with pytest.raises(ValueError, match=r"x\.bin is a pointer of git-lfs"):
        loaded_by(sharded / "x.bin", SMALL)


def test_shards_may_be_links_as_in_hugging_faces_cache(sharded, weights, tmp_path):
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.move(file, tmp_path / f"blobs/{number}")
        file.symlink_to(f"../blobs/{number}")
    assert holds(sharded, weights)


def test_a_broken_index_is_refused(sharded):
    """Also one that names files elsewhere."""
    places = places_of(sharded)
    for name in ("../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.bin", "", 3, None):
        write_index(sharded, {**places, "model.norm.weight": name})
        assert f"in its folder, got {name!r}" in refusal(sharded)
    for content in ("[]", '{"weight_map": []}', "{}", '{"weight_map": {}}', "cut", "[" * 100_000):
        (sharded / INDEX).write_text(content)
        assert INDEX in refusal(sharded)


def test_missing_damaged_and_confused_shards_are_named(sharded):
    found = places_of(sharded)
    one, two = sorted(set(found.values()))
    (sharded / one).rename(sharded / "away")
    assert one in refusal(sharded)
    (sharded / one).write_bytes((sharded / "away").read_bytes()[:200])
    assert one in refusal(sharded)
    (sharded / one).unlink()
    (sharded / "away").rename(sharded / one)
    write_index(sharded, {name: one if file == two else two for name, file in found.items()})
    assert "does not hold" in refusal(sharded)
    write_index(sharded, {name: file for name, file in found.items() if "norm" not in name})
    assert "which model.safetensors.index.json does not" in refusal(sharded)


def test_without_an_index_files_may_not_hold_a_weight_twice(sharded, weights):
    (sharded / INDEX).unlink()
    assert holds(sharded, weights)
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "old.safetensors")
    assert "both hold" in refusal(sharded)
    named = {f"model.{name}": weight for name, weight in weights.items()}
    save_file(named, sharded / "model.safetensors")
    assert holds(sharded, weights)  # as transformers does
    save_file({**named, "norm.weight": torch.zeros(32)}, sharded / "model.safetensors")
    assert "hf has norm.weight twice, once as " in refusal(sharded)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.pt", "pytorch_model-{}.bin"])
def test_pickled_weights_are_read(folder, weights, file):
    """Also files of torch 1.5, shards with an index, and next to what transformers' Trainer
    leaves.
    """
    places = divide(folder, lambda name: file.format(len(name) % 2))
    (folder / "training_args.bin").write_bytes(b"code")
    assert holds(folder, weights)
    for name in set(places.values()):
        torch.save(torch.load(folder / name), folder / name, _use_new_zipfile_serialization=False)
    assert holds(folder, weights)
    if "{}" in file:
        index = {"metadata": {}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert holds(folder, weights)


def test_files_with_other_names_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "other.bin")
    assert "has no weights (*.safetensors, pytorch_model*.bin" in refusal(folder)
    assert "other.bin has another name" in refusal(folder)


# Two statements of one model.


def edit(folder: Path, file: str = "config.json", **fields) -> None:
    """Change fields of a JSON file, which may not exist yet."""
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields}))


def with_weights(folder: Path, **changed: Tensor | None) -> None:
    """Change weights of a folder, by their names with _ for a dot; None removes one."""
    whole = load_file(folder / "model.safetensors")
    whole |= {name.replace("__", "."): weight for name, weight in changed.items()}
    kept = {name: weight.contiguous() for name, weight in whole.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")


def test_a_head_beside_tied_embeddings_is_not_dropped(folder, weights):
    """An equal one is tied, whatever its dtype; another one is trained with --untie."""
    embeddings = weights["embed_tokens.weight"]
    for dtype in (torch.float64, torch.bfloat16):
        with_weights(folder, lm_head__weight=embeddings.to(dtype))
        assert holds(folder, weights)
    with_weights(folder, lm_head__weight=torch.zeros(301, 32))
    assert "differs from the embeddings (shape (301, 32) and (300, 32))" in refusal(folder)
    head = embeddings.clone()
    head[17, 3] += 0.25
    with_weights(folder, lm_head__weight=head)
    message = refusal(folder)
    assert "has lm_head.weight, which differs from the embeddings (by up to 0.25)" in message
    assert f"tie_word_embeddings is true in {folder}/config.json: give --untie to" in message
    assert "or set tie_word_embeddings to false there" in message
    edit(folder, tie_word_embeddings=None)
    by_default = f"is true by default, which {folder}/config.json does not change: give --untie"
    assert f"but tie_word_embeddings {by_default}" in refusal(folder)
    edit(folder, tie_word_embeddings=True)
    untied = HFWeights(folder, untie=True)
    assert not untied.config.tie_embeddings
    assert untied["lm_head.weight"].equal(head)
    edit(folder, tie_word_embeddings=False)
    assert HFWeights(folder)["lm_head.weight"].equal(head)
    with pytest.raises(ValueError, match="expected a model with tied embeddings to untie"):
        HFWeights(folder, untie=True)
    with_weights(folder, lm_head__weight=None)
    assert "set tie_word_embeddings to true there if the head is tied" in refusal(folder)
    edit(folder, tie_word_embeddings=True)
    assert HFWeights(folder, untie=True)["lm_head.weight"].equal(embeddings)


def test_sizes_that_the_files_contradict_are_named(folder):
    written = (folder / "config.json").read_text()
    for field, value, message in (
        ("vocab_size", 301, "embed_tokens.weight of shape (301, 32), as {} says, got (300, 32)"),
        ("head_dim", 16, "q_proj.weight of shape (64, 32), as {} says, got (32, 32)"),
        ("num_hidden_layers", 2, "of 2 layers (num_hidden_layers of {}), got 3 layers"),
        ("num_hidden_layers", 4, "of 4 layers (num_hidden_layers of {}), got 3 layers"),
    ):
        (folder / "config.json").write_text(written)
        edit(folder, **{field: value})
        assert message.format(f"{folder}/config.json") in refusal(folder)


def test_weights_that_the_config_lacks_are_not_dropped_and_missing_ones_are_named(folder):
    with_weights(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    message = refusal(folder)
    assert "unexpected weights ['layers.0.self_attn.q_proj.bias'" in message
    assert f"as {folder}/config.json describes the model" in message
    with_weights(folder, model__layers__0__self_attn__q_proj__bias=None)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        with_weights(folder, model__norm__weight=torch.ones(32).to(dtype))
        assert "norm.weight in one of" in refusal(folder)
    with_weights(folder, model__norm__weight=None)
    assert "missing weights ['norm.weight']" in refusal(folder)


def test_saved_rotary_frequencies_are_those_of_the_config(folder, weights):
    frequencies = (1e4 ** -(torch.arange(0, 8, 2) / 8)).half()
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    with_weights(folder, **{name: frequencies})
    assert holds(folder, weights)
    edit(folder, rope_theta=1e6, rope_parameters=None)
    message = "rotary_emb.inv_freq are not the rotary frequencies of rope_theta 1000000"
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        (2, 3, "eos_token_id is 2, but 3 in {}/generation_config.json"),
        ([2, 5], [3, 4], "eos_token_id is [2, 5], but [3, 4] in {}/generation_config.json"),
        (300, None, "eos_token_id is 300, beyond vocab_size 300"),
        (None, [3, 400], "eos_token_id is 400 in {}/generation_config.json, beyond vocab_size 300"),
        (2, [3, 2], None),
        (None, 3, None),
    ],
)
def test_tokens_of_generation_are_those_of_the_config(folder, weights, config, generation, message):
    """Begin tokens may differ: published folders have two, and training uses neither."""
    edit(folder, bos_token_id=1)
    edit(folder, "generation_config.json", bos_token_id=4)
    edit(folder, eos_token_id=config)
    edit(folder, "generation_config.json", eos_token_id=generation)
    if message is None:
        assert holds(folder, weights)
    else:
        assert message.format(folder) in refusal(folder)


# Writers of files.


def model_center(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names of ModelCenter's Llama."""
    parts = {
        "embed_tokens": "input_embedding",
        "lm_head": "output_projection",
        "input_layernorm": "self_att.layernorm_before_attention",
        "post_attention_layernorm": "ffn.layernorm_before_ffn",
        "norm": "encoder.output_layernorm",
        "self_attn": "self_att.self_attention",
        "layers": "encoder.layers",
        "mlp": "ffn.ffn",
        "gate_proj": "w_in.w_0",
        "up_proj": "w_in.w_1",
        "down_proj": "w_out",
        "o_proj": "attention_out",
        **{f"{x}_proj": f"project_{x}" for x in "qkv"},
    }
    return {".".join(parts.get(x, x) for x in n.split(".")): w for n, w in weights.items()}


PREFIXES = {
    "ours": "",
    "Hugging Face": "model.",
    "DistributedDataParallel": "module.",
    "compiled": "_orig_mod.model.",
}


@pytest.mark.parametrize(
    ("origin", "ending"),
    [
        *zip(PREFIXES, ("pt", "bin", "pth", "safetensors"), strict=True),
        ("ModelCenter", "safetensors"),
    ],
)
def test_a_file_is_read_under_the_names_of_its_writer(tmp_path, origin, ending):
    whole = dict(initialized(LLAMA).state_dict())
    if origin == "ModelCenter":
        written = model_center(whole) | {"position_bias.inv_freq": 1e4 ** -(torch.arange(4) / 4)}
    else:
        outer = PREFIXES[origin].removesuffix("model.")
        written = {
            (outer if name == "lm_head.weight" else PREFIXES[origin]) + name: weight
            for name, weight in whole.items()
        }
    file = tmp_path / f"w.{ending}"
    save_file(written, file) if ending == "safetensors" else torch.save(written, file)
    loaded = loaded_by(file, LLAMA)
    assert loaded.keys() == whole.keys()
    assert all(loaded[name].view(weight.shape).equal(weight) for name, weight in whole.items())


BEE = dataclasses.replace(LIVE["cpm-bee-tiny"], num_layers=2, fp16_rotary=True)
THEIRS = {  # what CPM-Live and Hugging Face have in config.json
    "": {**BEE.to_dict(), "model_type": "cpm-bee"},
    "cpmbee.": {
        "model_type": "cpmbee",
        "architectures": ["CpmBeeForCausalLM"],
        "torch_dtype": "float16",
        "half": True,
        "use_cache": True,
        **{HF_FIELDS.get(n, n): x for n, x in BEE.to_dict().items() if n != "model_type"},
    },
}


@pytest.mark.parametrize("prefix", THEIRS)
def test_a_folder_of_a_bee_is_read(tmp_path, prefix):
    """CPM-Live's file with its configuration, and what transformers' code writes."""
    torch.manual_seed(0)
    whole = {name: torch.randn(x.shape) for name, x in CPMBee(BEE).state_dict().items()}
    written = {prefix + name: weight for name, weight in whole.items()}
    if prefix:
        written["lm_head.weight"] = whole["input_embedding.weight"]
    torch.save(written, tmp_path / "pytorch_model.bin")
    edit(tmp_path, **THEIRS[prefix])
    config = TrainConfig(init_from=str(tmp_path))
    assert config.model_config() == BEE
    assert TrainConfig(model=str(tmp_path / "config.json")).model_config() == BEE
    assert holds_in_engine(config, CPMBee(BEE), whole)
    edit(tmp_path, **{"hidden_size" if prefix else "dim_model": 64})
    with pytest.raises(ValueError, match=rf"as {tmp_path}/config.json says, got"):
        holds_in_engine(config, CPMBee(config.model_config()), whole)
    if prefix:
        edit(tmp_path, distance_scale=8)
        with pytest.raises(ValueError, match=r"config.json: distance_scale must be 16, got 8"):
            config.model_config()
        edit(tmp_path, **THEIRS[prefix], distance_scale=16)
        torch.save({**written, "lm_head.weight": torch.ones(320, 128)}, tmp_path / "w.bin")
        with pytest.raises(ValueError, match="the head of a cpm-bee is tied to its embeddings"):
            load_weights(str(tmp_path / "w.bin"), Shards(CPMBee(BEE)), config.expected_weights())


def test_a_folder_of_modelcenter_is_told_from_a_bee_by_its_weights(tmp_path):
    """Where config.json has sizes only."""
    weights = initialized(LLAMA_ALIKE).state_dict()
    torch.save(model_center(weights), tmp_path / "pytorch_model.pt")
    sizes = {"vocab_size": 300, "dim_model": 32, "dim_ff": 48, "num_layers": 3}
    edit(tmp_path, **sizes, num_heads=4, dim_head=8, architectures=["Llama"])
    with pytest.raises(ValueError, match="one of cpm-bee, cpm-ant, or the pos_bias_type of Model"):
        TrainConfig(model=str(tmp_path / "config.json")).model_config()
    config = TrainConfig(init_from=str(tmp_path))
    assert config.model_config() == LLAMA_ALIKE
    assert holds_in_engine(config, CPM(LLAMA_ALIKE), weights)
    edit(tmp_path, ffn_activate_fn="gated_silu", dim_model="32")
    with pytest.raises(ValueError, match="dim_model must be a positive int, got '32'"):
        config.model_config()
    edit(tmp_path, ffn_activate_fn="gated_gelu", dim_model=32)
    with pytest.raises(ValueError, match=r"expected .*gated_silu.* computes, got .*gated_gelu"):
        config.model_config()
    with pytest.raises(ValueError, match=r"config.json: expected .*gated_silu"):
        TrainConfig(model=str(tmp_path / "config.json")).model_config()


def test_the_model_of_an_exported_file_is_named(tmp_path, weights):
    torch.save(weights, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text("{}")
    file, shape = tmp_path / "model.pt", tmp_path / "model.json"
    with pytest.raises(ValueError, match=rf"give the file {file}, and --model {shape}"):
        TrainConfig(init_from=str(tmp_path)).model_config()
    save_weights(tmp_path / "hf", SMALL, weights)
    found = TrainConfig(model=str(tmp_path / "hf/config.json")).model_config()
    assert found == HFWeights(tmp_path / "hf").config
    bee = TrainConfig(model="cpm-bee-tiny", init_from=str(tmp_path / "hf"))
    with pytest.raises(ValueError, match=r"hf, a cpm, does not go with --model cpm-bee-tiny, a "):
        bee.model_config()
    for model in ("cpm-tiny", "cpm-bee-tiny"):
        config = TrainConfig(init_from=str(file), model=model)
        with pytest.raises(ValueError) as refused:
            load_weights(str(file), Shards(CPM(SMALL)), config.expected_weights())
        assert str(refused.value).endswith(f": give --model {shape}")
    assert "Face's weights, a cpm, expected the weights of --model cpm-bee-" in str(refused.value)
    (tmp_path / "model.json").unlink()
    with pytest.raises(ValueError, match=": give --model with the configuration of these weights"):
        load_weights(str(file), Shards(CPM(SMALL)), config.expected_weights())


# A larger vocabulary.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_tokens_get_the_mean_of_the_others(tmp_path, tied):
    """With small noise, which is the same for any division into shards and differs by seed."""
    config = dataclasses.replace(LLAMA, tie_embeddings=tied)
    whole = initialized(config).state_dict()
    torch.save(whole, tmp_path / "w.pt")
    grown = CPM(dataclasses.replace(config, vocab_size=303))
    found = loaded_by(tmp_path / "w.pt", config, Shards(grown))
    names = ["embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    for name in names:
        rows, old = found[name].view(303, 32), whole[name]
        assert rows[:300].equal(old)
        noise = (rows[300:] - old.mean(0)) / old.std(0, correction=0)
        assert 0.005 < noise.std() < 0.02 and not noise[0].allclose(noise[1])
    assert tied or not found[names[0]][-96:].allclose(found[names[1]][-96:])
    for size in (2, 5):
        parts = [loaded_by(tmp_path / "w.pt", config, Shards(grown, r, size)) for r in range(size)]
        assert all(torch.cat([part[n] for part in parts]).equal(found[n]) for n in found)
    other = loaded_by(tmp_path / "w.pt", config, Shards(grown), seed=1)
    assert not other[names[0]].equal(found[names[0]])


BROKEN = [
    ({"num_attention_heads": "4"}, "num_attention_heads must be a positive int, got '4'"),
    ({"vocab_size": None}, "lacks ['vocab_size']"),
    ({"vocab_size": 10**30}, "less than 1e15 parameters, got"),
    ({"num_hidden_layers": 10**9}, "weights of 1000000000 layers (num_hidden_layers of"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be float, got '1e-5'"),
    ({"rope_scaling": "none"}, "rope_scaling must hold names and values, got 'none'"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta must be positive"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"scale_emb": [12]}, "scale_emb must be float, got [12]"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ({"rope_parameters": {"factor": 4.0}}, "has a factor without a kind of scaling: add a rope_"),
    ({"model_type": ["llama"]}, "model_type"),
]


def test_broken_configs_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for change, message in BROKEN:
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert message in refusal(folder)
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'"text"'):
        (folder / "config.json").write_bytes(content)
        assert "config.json" in refusal(folder)


def test_what_is_no_folder_is_refused(tmp_path, folder):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(folder / "model.safetensors")
    (folder / "config.json").rename(folder / "step_00000005")
    assert "has no config.json, expected a Hugging Face model folder: train" in refusal(folder)
    with pytest.raises(ValueError, match="--init-from must not be empty"):
        TrainConfig(init_from="")


class Shards:
    """An engine that has one of `size` ranks' shards of a model."""

    def __init__(self, model: torch.nn.Module, rank: int = 0, size: int = 1):
        self.loaded: dict[str, Tensor] = {}
        self._shards = {}
        for name, weight in model.state_dict().items():
            parts = weight.flatten().tensor_split(size)
            start = sum(map(len, parts[:rank]))
            self._shards[name] = Shard(parts[rank], start, tuple(weight.shape))

    def state(self) -> dict[str, Shard]:
        return {
            f"{kind}/{name}": shard
            for kind in ("weight", "exp_avg")
            for name, shard in self._shards.items()
        }

    def load(self, read, optimizer_steps: int) -> None:
        found = {key: read(key, shard) for key, shard in self.state().items()}
        self.loaded = {
            key.removeprefix("weight/"): x for key, x in found.items() if key.startswith("weight/")
        }


def loaded_by(
    source: Path, config: CPMConfig, engine: Shards | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return the weights in a file as an engine reads them, for --model small."""
    engine = engine or Shards(CPM(config))
    load_weights(str(source), engine, Expected(config, "cpm", "--model small"), seed)
    return engine.loaded


def holds_in_engine(config: TrainConfig, model: torch.nn.Module, weights: dict) -> bool:
    """Whether an engine of the model has these weights after it has read those of a run."""
    engine = Shards(model)
    load_weights(config.init_from, engine, config.expected_weights())
    return all(engine.loaded[name].equal(x.flatten()) for name, x in weights.items())


class Code:
    def __reduce__(self):
        return print, ("this ran",)


FOREIGN = [
    ("base_model.model.layers.0.q_proj.lora_A.weight", "looks like an adapter (LoRA) (bas"),
    ("model.layers.0.mlp.up_proj.qweight", "looks like quantized weights"),
    ("model.layers.0.mlp.experts.0.up_proj.weight", "looks like a mixture of experts"),
    ("layers.0.attention.wq.weight", "looks like Meta's files of a Llama"),
    ("transformer.h.0.attn.c_attn.weight", "looks like a GPT-2"),
    ("position_bias_enc.relative_attention_bias", "looks like ModelCenter's CPM2 or T5"),
    ("a.weight", "has unknown names, ['a.weight'], expected Hugging"),
]
NO_CODE, NO_TENSORS = "only names and tensors are unpickled", "does not hold names and tensors"
UNREADABLE = [
    (Code(), NO_CODE),
    ({"norm.weight": Code()}, NO_CODE),
    ({1: torch.ones(32)}, NO_TENSORS),
    ({"norm.weight": torch.ones(32, dtype=torch.int64)}, NO_TENSORS),
    ({"norm.weight": torch.ones(32).to_sparse()}, NO_TENSORS),
    ([1.0], NO_TENSORS),
    ({"norm.weight": torch.ones(31)}, "has unknown names, ['norm.weight'], expected"),
]


def test_files_that_hold_other_than_the_models_weights_are_refused(tmp_path, weights, capsys):
    """They are named after their writers. Code in them does not run."""
    bee = ["input_embedding.weight", "position_bias.relative_attention_bias"]
    looks_like_bee = "looks like CPM-Live's CPM-Bee (or ModelCenter's tied CPM1), a cpm-bee, "
    foreign = [([name], message) for name, message in FOREIGN]
    foreign += [([], "has no weights"), (bee, f"{looks_like_bee}expected the weights of --model s")]
    foreign += [([*bee, "output_projection.weight"], "CPM1, expected Hugging Face's names")]
    foreign += [([*bee, "prompt_embedding.weight"], "CPM3, expected Hugging Face's names")]
    cases = [({name: torch.ones(2, 2) for name in x}, message) for x, message in foreign]
    for key in ("model", "module", "state_dict"):
        cases.append(({key: weights, "optimizer": {"state": {}}}, f"FILE)['{key}']"))
    spoiled = {**weights, "norm.weight": torch.full((32,), torch.nan)}
    for content, message in (*cases, *UNREADABLE, (spoiled, "norm.weight is not finite")):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(ValueError) as refused:
            loaded_by(tmp_path / "w.pt", SMALL)
        assert message in str(refused.value) and "\n" not in str(refused.value)
    assert "this ran" not in capsys.readouterr().out
    torch.save(weights, tmp_path / "w.pt")
    cut = (tmp_path / "w.pt").read_bytes()[:5000]  # as of a download that ended early
    for content in (b"", b"junk", b"PK\x03\x04" + 100 * b"\0", cut):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.pt is not a file of weights: [^\n]*$"):
            loaded_by(tmp_path / "w.pt", SMALL)
    with pytest.raises(OSError, match="No such file"):
        loaded_by(tmp_path / "nowhere.pt", SMALL)
