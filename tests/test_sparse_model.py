"""Models with sparse attention: their configuration, their loss on any ranks, and their FLOPs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from bmt_burst import InfLLMV2, Layout, Mask, simulate
from bmt_burst.ranks.sequence_parallel import SequenceParallel
from models.blocks import Saving
from models.config import PRESETS, CPMConfig
from models.cpm import CPM
from models.hf_config import config_from_hf, config_to_hf
from tests.sparse import RELEASED, llama_config, record_choices
from tests.test_sala import loss_and_gradients
from tests.test_sparse import SMALL
from train.data.batches import sparse_keys
from train.loop.measure import step_flops

TINY = CPMConfig(40, 32, 48, 2, 4, 2, 8, scale_emb=12.0, scale_depth=1.4, sparse=SMALL)


def test_sparse_config_is_read_and_written():
    dense = PRESETS["minicpm4-8b"]
    hf = config_to_hf(dense)
    assert "sparse_config" not in hf
    config = config_from_hf(hf | {"sparse_config": RELEASED})
    assert config == dataclasses.replace(config_from_hf(hf), sparse=InfLLMV2())
    assert CPMConfig.from_dict(config.to_dict()) == config
    for changed in (RELEASED, RELEASED | {"use_nope": True, "dense_len": -1, "topk": 62}):
        config = config_from_hf(hf | {"sparse_config": changed})
        assert config_to_hf(config)["sparse_config"] == changed


def test_a_config_of_minicpm41_is_read_and_written():
    """With the names that MiniCPM's own code reads, and those that change nothing here."""
    preset = PRESETS["minicpm4.1-8b"]
    factors = list(preset.rope_scaling.long_factor)
    factors = {"long_factor": factors, "short_factor": factors}
    hf = {"model_type": "minicpm", "hidden_act": "silu", "hidden_size": 4096, "vocab_size": 73448}
    hf |= {"architectures": ["MiniCPMForCausalLM"], "torch_dtype": "bfloat16", "use_cache": True}
    hf |= {"auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"}}
    hf |= {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.1}
    hf |= {"bos_token_id": 1, "eos_token_id": [2, 73440], "rms_norm_eps": 1e-06}
    hf |= {"intermediate_size": 16384, "max_position_embeddings": 65536, "mup_denominator": 32}
    hf |= {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 2}
    hf |= {"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "sparse_config": RELEASED}
    hf |= {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "longrope", **factors}}
    hf["rope_scaling"]["original_max_position_embeddings"] = 65536
    config = config_from_hf(hf)
    same = {"init_std": preset.init_std, "max_position_embeddings": None}
    assert dataclasses.replace(config, **same) == preset
    written = config_to_hf(config)
    shared = (hf.keys() & written.keys()) - {"rope_scaling", "scale_depth"}
    assert {name: written[name] for name in shared} == {name: hf[name] for name in shared}
    assert hf["rope_scaling"].items() <= written["rope_scaling"].items()
    assert config_from_hf(written) == dataclasses.replace(
        config, scale_depth=written["scale_depth"]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 3}, r"sparse_config: expected some of .* got \['top_k'\]"),
        ({"topk": 1}, r"sparse_config: expected topk of at least init_blocks \+ 1 = 2, got 1"),
        ("infllm", "sparse_config: expected names and values, got 'infllm'"),
    ],
)
def test_other_sparse_configs_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(config_to_hf(PRESETS["minicpm4-8b"]) | {"sparse_config": given})
    with pytest.raises(ValueError, match="expected sparse or window"):
        dataclasses.replace(TINY, window=8)


@pytest.mark.parametrize(
    ("saving", "use_nope"),
    [
        (Saving(), False),
        (Saving("selective", every=2, tile=7), False),
        (Saving("full", every=2, tile=7), False),
        (Saving("selective"), True),
        (Saving("full", every=2), True),
    ],
    ids=str,
)
def test_loss_and_gradients_do_not_depend_on_the_ranks(saving, use_nope, monkeypatch):
    """A model in fp64, so that sums in another order differ by 1e-12 of them at most."""
    config = dataclasses.replace(TINY, sparse=dataclasses.replace(SMALL, use_nope=use_nope))
    model = CPM(config, saving=saving).double()
    for name, weight in model.named_parameters():
        model.init_parameter(name, weight.data, torch.default_generator)
    row = (0, 20, 90), torch.randint(40, (1, 90))
    exact = loss_and_gradients(model, SequenceParallel(), Layout.zigzag(90, 1), *row)
    chosen = record_choices(monkeypatch)
    for size, name in ((2, "zigzag"), (3, "striped")):
        layout = Layout.named(name, 90, size)

        def work(ring, size=size, layout=layout):
            sp = SequenceParallel(ring.rank, size, process_group=ring)
            return loss_and_gradients(model, sp, layout, *row)

        chosen.clear()
        for mine, expected in zip(
            map(sum, zip(*simulate(size, work), strict=True)), exact, strict=True
        ):
            assert (mine - expected).norm() <= 1e-12 * expected.norm()
        assert len(chosen) == size * TINY.num_layers  # once in each layer of each rank


def test_flops_count_the_chosen_keys_and_the_choice():
    mask, most = Mask.documents((0, 13, 200)), SMALL.most_blocks
    found = sparse_keys(mask, SMALL)
    for position, place in ((5, 5), (12, 12), (13, 0), (199, 186)):
        own = place // SMALL.block_size
        keys = min(own, most - 1) * SMALL.block_size + place % SMALL.block_size + 1
        if own >= most:
            kernels = [j for j in range(200) if 2 * j + 3 <= place]
            longer = [j for j in range(200) if 8 * j + 15 <= place]
            keys += (len(kernels) + len(longer)) // 6
        assert found[position] == keys
    padded = Mask(210, mask.slices)
    assert sparse_keys(padded, SMALL).tolist() == found.tolist() + 10 * [0]
    assert step_flops(TINY, 0, int(found.sum())) < step_flops(TINY, 0, mask.area)


def test_transformers_models_with_a_sparse_config_are_sparse_over_ranks(monkeypatch):
    """A Llama's logits are those of a CPM with the same weights."""
    transformers = pytest.importorskip("transformers")
    from bmt_burst.adapters.transformers import enable

    config = llama_config(SMALL)
    llama = transformers.LlamaForCausalLM(config).double().requires_grad_(False)
    given = {name: value for name, value in config.to_dict().items() if name != "sparse_config"}
    model = CPM(dataclasses.replace(config_from_hf(given), sparse=SMALL)).double()
    weights = {name.removeprefix("model."): x for name, x in llama.state_dict().items()}
    model.load_state_dict(weights)
    tokens = torch.randint(40, (1, 90))
    exact = model(tokens, torch.arange(90)).detach()
    assert not torch.allclose(llama(tokens).logits, exact, atol=1e-3)  # transformers is dense

    def work(ring):
        sp = SequenceParallel(ring.rank, 2, process_group=ring)
        return enable(copy.deepcopy(llama), sp)(tokens).logits

    got = Layout.zigzag(90, 2).unshard(simulate(2, work))
    assert (got - exact).abs().max() < 1e-5  # transformers rotates in fp32

    chosen = record_choices(monkeypatch)
    for use_reentrant in (False, True):

        def train(ring, use_reentrant=use_reentrant):
            sp = SequenceParallel(ring.rank, 2, process_group=ring)
            trained = enable(copy.deepcopy(llama).train(), sp)
            trained.requires_grad_().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            trained.enable_input_require_grads()
            trained(tokens, labels=tokens).loss.backward()

        chosen.clear()
        simulate(2, train)
        assert len(chosen) == 2 * config.num_hidden_layers  # once in each layer of each rank

    def refused(ring):
        with pytest.raises(ValueError, match="sparse_config: expected") as caught:
            work(ring)
        return str(caught.value)

    for given, message in (
        ({"top_k": 3}, r"got ['top_k']"),
        ("infllm", "names and values, got 'infllm'"),
        (SMALL.to_dict() | {"use_nope": True}, "use_nope=False, since transformers passes rotated"),
    ):
        config.sparse_config = given
        assert all(message in error for error in simulate(2, refused))
