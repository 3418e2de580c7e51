"""Weights to start from: which files of a folder are read, and what is said of those that cannot
be.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.huggingface import HFWeights, save_weights
from tests.test_model import SMALL, initialized
from train.checkpoints.weights import load_weights
from train.engine import Shard
from train.run.config import TrainConfig

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return initialized(SMALL).state_dict()


@pytest.fixture
def folder(tmp_path, weights) -> Path:
    """A model in one file."""
    save_weights(tmp_path / "hf", SMALL, weights)
    return tmp_path / "hf"


@pytest.fixture
def sharded(folder) -> Path:
    """The same in two files with their index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: whole[name] for name in names if places[name] == file}, folder / file)
    write_index(folder, places)
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


@pytest.mark.parametrize(
    "leftover", ["model-00000-of-00009.safetensors", "zz.safetensors", "model.safetensors"]
)
def test_of_a_folder_with_an_index_only_the_files_that_it_names_are_read(
    sharded, weights, leftover
):
    first = sharded / "model-00001-of-00002.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(first).items()}, sharded / leftover)
    assert holds(sharded, weights)


def test_a_weight_in_two_shards_is_read_where_the_index_says(sharded, weights):
    name, place = next(iter(places_of(sharded).items()))
    [other] = set(places_of(sharded).values()) - {place}
    save_file({**load_file(sharded / other), name: torch.zeros(1)}, sharded / other)
    assert holds(sharded, weights)


def test_shards_may_be_links_as_in_hugging_faces_cache(sharded, weights, tmp_path):
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.move(file, tmp_path / f"blobs/{number}")
        file.symlink_to(f"../blobs/{number}")
    assert holds(sharded, weights)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.bin", "", 3, None, [1]]
)
def test_an_index_names_files_of_its_folder_only(sharded, name):
    write_index(sharded, {**places_of(sharded), "model.norm.weight": name})
    assert f"in its folder, got {name!r}" in refusal(sharded)


@pytest.mark.parametrize(
    "content", ["[]", '{"weight_map": []}', "{}", '{"weight_map": {}}', "cut", "[" * 100_000]
)
def test_a_broken_index_is_refused(sharded, content):
    (sharded / INDEX).write_text(content)
    assert INDEX in refusal(sharded)


def test_missing_damaged_and_confused_shards_are_named(sharded):
    one, two = sorted(set(places_of(sharded).values()))
    (sharded / one).rename(sharded / "away")
    assert one in refusal(sharded)
    (sharded / one).write_bytes((sharded / "away").read_bytes()[:200])
    assert one in refusal(sharded)
    (sharded / one).unlink()
    (sharded / "away").rename(sharded / one)
    write_index(
        sharded, {name: one if file == two else two for name, file in places_of(sharded).items()}
    )
    assert "does not hold" in refusal(sharded)


def test_without_an_index_files_may_not_hold_a_weight_twice(sharded, weights):
    (sharded / INDEX).unlink()
    assert holds(sharded, weights)
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "old.safetensors")
    assert "both hold" in refusal(sharded)
    save_file(
        {f"model.{name}": weight for name, weight in weights.items()}, sharded / "model.safetensors"
    )
    assert holds(sharded, weights)  # as transformers does


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]
)
def test_pickled_weights_are_not_read(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    said = refusal(folder)
    assert name in said
    assert "only safetensors are read" in said
    (folder / name).unlink()
    assert "has no weights" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive int, got 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive int, got '4'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a positive int, got -2"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive int, got 32.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive int, got True"),
        ({"head_dim": 0}, "head_dim must be a positive int, got 0"),
        ({"vocab_size": None}, "lacks ['vocab_size']"),
        ({"vocab_size": 10**30}, "less than 1e15 parameters, got"),
        (
            {"num_hidden_layers": 10**9},
            "weights of 1000000000 layers (num_hidden_layers), got 29 weights",
        ),
        ({"intermediate_size": 49}, "of shape (49, 32), got (48, 32)"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be float, got '1e-5'"),
        ({"rope_scaling": "none"}, "rope_scaling must hold names and values, got 'none'"),
        ({"rope_parameters": [1]}, "rope_parameters must hold names and values, got [1]"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions are scaled"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"scale_emb": [12]}, "scale_emb must be float, got [12]"),
        ({"tie_word_embeddings": "yes"}, "tie_embeddings must be bool, got 'yes'"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_broken_configs_are_refused(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert message in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"text"'])
def test_configs_that_are_no_json_object_are_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)


def test_what_is_no_folder_is_refused(tmp_path, folder):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)
    with pytest.raises(ValueError, match="--init-from must not be empty"):
        TrainConfig(init_from="")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_few_bits_are_refused(folder, dtype):
    whole = load_file(folder / "model.safetensors")
    save_file(
        {**whole, "model.norm.weight": torch.ones(32).to(dtype)}, folder / "model.safetensors"
    )
    assert "norm.weight in one of" in refusal(folder)


class OnePiece:
    """An engine's state and loading, of the last norm's weight alone."""

    def state(self) -> dict[str, Shard]:
        return {
            f"{kind}/norm.weight": Shard(torch.empty(32), 0, (32,))
            for kind in ("weight", "exp_avg")
        }

    def load(self, read, optimizer_steps: int) -> None:
        self.loaded = {key: read(key, shard) for key, shard in self.state().items()}


def test_weights_that_are_not_finite_start_no_run(folder):
    whole = load_file(folder / "model.safetensors")
    save_file(
        {**whole, "model.norm.weight": torch.full((32,), torch.nan)}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"norm.weight is not finite"):
        load_weights(str(folder), OnePiece(), "small")


class Code:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Code(), "only names and tensors are unpickled"),
        ({"norm.weight": Code()}, "only names and tensors are unpickled"),
        ({1: torch.ones(32)}, "does not hold names and tensors"),
        ({"norm.weight": torch.ones(32, dtype=torch.int64)}, "does not hold names and tensors"),
        ({"norm.weight": torch.ones(32).to_sparse()}, "does not hold names and tensors"),
        ({"norm.weight": [1.0]}, "does not hold names and tensors"),
        ({"norm.weight": torch.ones(31)}, "does not hold the weights of --model small"),
        ({"norm.weight": torch.full((32,), torch.inf)}, "norm.weight is not finite"),
    ],
)
def test_files_that_hold_other_than_the_models_weights_are_refused(
    tmp_path, content, message, capsys
):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ValueError) as refused:
        load_weights(str(tmp_path / "w.pt"), OnePiece(), "small")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04" + 100 * b"\0"])
def test_files_that_are_no_archive_of_weights_are_refused(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"w\.pt is not a file of weights: [^\n]*$"):
        load_weights(str(tmp_path / "w.pt"), OnePiece(), "small")
    with pytest.raises(OSError, match="No such file"):
        load_weights(str(tmp_path / "nowhere.pt"), OnePiece(), "small")
