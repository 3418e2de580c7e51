"""Checkpoints of other projects: transformers' models in each family and with each rotary scaling,
there and back.
"""

import dataclasses
import json
import math
import re

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from bmt_burst import Cache, InfLLMV2, Layout, SequenceParallel, simulate
from bmt_burst.errors import RanksDisagree
from bmt_burst.nn import rope_frequencies
from bmt_burst.sequence.mask import Mask
from models.config import PRESETS, CPMConfig
from models.cpm import CPM
from models.hf_sala import mixers_to_hf
from models.huggingface import (
    HFWeights,
    config_from_hf,
    config_to_hf,
    fold_scalings,
    load_cpm,
    save_weights,
)
from models.rope import RopeScaling
from tests.rings import on_ranks
from tests.test_model import SMALL, initialized
from train.loop.measure import step_flops

ORIGINAL = 16  # tokens that the small models were "first trained" with
# rising: transformers remembers the longest for dynamic scalings
LENGTHS = (13, ORIGINAL, ORIGINAL + 1, 45)
# Logits in fp32 agree to 1e-5 of the largest: sums of some hundred products are rounded in other
# orders, and transformers has phases in fp32, which at position 45 are off by 3e-6.
CLOSE = 1e-5

ORIGINALLY = {"original_max_position_embeddings": ORIGINAL}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 7.5], **ORIGINALLY}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINALLY}
BETAS = {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.25, "attention_factor": 1.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, **BETAS},
    "yarn, mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 3},
    "llama3": {**LLAMA3, **ORIGINALLY},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope, factor": {"rope_type": "longrope", "factor": 3.0, **LONG},
    "longrope, attention_factor": {"rope_type": "longrope", "attention_factor": 1.3, **LONG},
}
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
SLIDING, FULL = "sliding_attention", "full_attention"
SIX = {"num_hidden_layers": 6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
MULTIPLIERS["attention_multiplier"] = 0.2
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama, biases": (LlamaConfig, {**BIASED, **TIED, "mlp_bias": True}),
    "minicpm5": (LlamaConfig, {"num_attention_heads": 16, "num_key_value_heads": 2}),
    "mistral": (MistralConfig, {"sliding_window": 7}),
    "ministral": (MinistralConfig, {"sliding_window": 7, "layer_types": [FULL, SLIDING]}),
    "qwen2": (Qwen2Config, TIED),
    "qwen2, windows": (Qwen2Config, {**WINDOWS, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {}),
    "qwen3, biases, windows": (
        Qwen3Config,
        {**BIASED, **WINDOWS, **TIED, "layer_types": [SLIDING, FULL]},
    ),
    "smollm3": (SmolLM3Config, {**SIX, "no_rope_layer_interval": 3}),
    "smollm3, windows": (
        SmolLM3Config,
        {**SIX, **WINDOWS, **BIASED, "mlp_bias": True, "no_rope_layers": [1, 0, 1, 1, 0, 1]},
    ),
    "granite": (GraniteConfig, MULTIPLIERS),
    "granite, biases": (
        GraniteConfig,
        {**MULTIPLIERS, **BIASED, **TIED, "mlp_bias": True, "logits_scaling": 7.0},
    ),
    "seed_oss": (SeedOssConfig, NO_DROPOUT),
    "seed_oss, other biases": (
        SeedOssConfig,
        {
            **NO_DROPOUT,
            **TIED,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    ),
}
PAIRS = [*(("llama", rope) for rope in ROPES), ("qwen3, biases, windows", "longrope")]
PAIRS += [(family, "none") for family in FAMILIES if family != "llama"]


def config_of(family: str, rope: str) -> PreTrainedConfig:
    cls, changes = FAMILIES[family]
    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": ORIGINAL if rope == "dynamic" else 4 * ORIGINAL,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **ROPES[rope]},
    }
    return cls(**{**sizes, **changes})


def theirs_of(family: str, rope: str) -> torch.nn.Module:
    """Return a transformers model with random weights, norms and biases among them."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config_of(family, rope), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.requires_grad_(False)


def tokens_of(length: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 131, (rows, length), generator=torch.Generator().manual_seed(length))


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max() / theirs.abs().max())


def with_length(config: CPMConfig, longest: int | None) -> CPMConfig:
    return dataclasses.replace(config, max_position_embeddings=longest)


@pytest.mark.parametrize(("family", "rope"), PAIRS)
def test_logits_are_those_of_transformers_there_and_back(family, rope, tmp_path):
    theirs = theirs_of(family, rope)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_cpm(tmp_path / "theirs").requires_grad_(False)
    save_weights(tmp_path / "ours", ours.config, ours.state_dict())
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(again) is type(theirs)
    for length in LENGTHS:
        tokens = tokens_of(length)
        expected = theirs(tokens).logits
        assert error(ours(tokens, torch.arange(length)), expected) < CLOSE
        # attention_factor in the place of mscale may round once
        assert error(again(tokens).logits, expected) < 1e-6
    read = HFWeights(tmp_path / "ours")
    assert read.config == with_length(ours.config, read.config.max_position_embeddings)
    # rotary scaling of Llama 3 goes further than it says: 16 tokens, 8 times longer
    longest = 128 if rope == "llama3" else theirs.config.max_position_embeddings
    assert read.config.max_position_embeddings == longest
    assert all(read[name].equal(weight) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope != "none"])
def test_older_spellings_mean_the_same(rope):
    new = config_of("llama", rope).to_dict()
    expected = config_from_hf(new)
    scaling = dict(new.pop("rope_parameters"))
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old = {
        **new,
        "rope_theta": theta,
        "rope_scaling": {"type": kind, **scaling},
        "rope_parameters": None,
    }
    assert config_from_hf(old) == expected
    assert config_from_hf({**old, "rope_scaling": {"rope_type": kind, **scaling}}) == expected
    if original := scaling.pop("original_max_position_embeddings", None):  # as Phi 3's have it
        apart = {**old, "rope_scaling": {"type": kind, **scaling}}
        assert config_from_hf({**apart, "original_max_position_embeddings": original}) == expected


def test_two_fields_that_agree_are_read_and_those_that_contradict_each_other_are_refused():
    hf = config_of("llama", "yarn").to_dict()
    scaling = {name: value for name, value in hf["rope_parameters"].items() if name != "rope_theta"}
    both = {**hf, "rope_scaling": {"type": "yarn", **scaling}, "rope_theta": 500.0}
    assert config_from_hf(both) == config_from_hf(hf)
    for change, message in (
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "contradict each other"),
        ({"rope_theta": 77.0}, "rope_theta 77.0 and rope_parameters's rope_theta 500.0 contradict"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings 32 and "),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf({**hf, **change})


SCALING = {"kind": "longrope", **LONG, "original_length": 16, "factor": 4.0}
del SCALING["original_max_position_embeddings"]
MINICPM4 = dataclasses.replace(SMALL, rope_scaling=RopeScaling.from_dict(SCALING))


def test_minicpm4_folds_into_a_llama_with_the_same_logits(tmp_path):
    """There is no MiniCPM in transformers, but its scalings fold into a Llama's weights."""
    model = initialized(MINICPM4).requires_grad_(False)
    save_weights(tmp_path / "minicpm", model.config, model.state_dict())
    hf = json.loads((tmp_path / "minicpm/config.json").read_text())
    assert (hf["model_type"], hf["max_position_embeddings"]) == ("minicpm", 64)
    # MiniCPM4's own config.json has neither the one nor, in places, the other
    for name in ("factor", "rope_type"):
        del hf["rope_scaling"][name]
    del hf["rope_parameters"]
    (tmp_path / "minicpm/config.json").write_text(json.dumps(hf))
    read = load_cpm(tmp_path / "minicpm").requires_grad_(False)
    assert dataclasses.replace(read.config, init_std=SMALL.init_std) == with_length(MINICPM4, 64)
    save_weights(tmp_path / "llama", *fold_scalings(read.config, read.state_dict()))
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    for length in LENGTHS:
        tokens = tokens_of(length)
        assert error(read(tokens, torch.arange(length)), llama(tokens).logits.detach()) < CLOSE


def test_other_fields_of_minicpm4_change_nothing():
    """Its denominator is the number of layers, and the others are switched off. Without a
    model_type it is known by its architecture.
    """
    hf = config_to_hf(SMALL)
    more = {"use_mup": True, "mup_denominator": SMALL.num_layers, "no_rope": False}
    found = hf | more | {"sparse_config": None}
    del found["model_type"]
    assert config_from_hf(found) == config_from_hf(hf)


def test_exported_lengths_keep_the_scaling():
    def most(rope: str, **to) -> int | None:
        config = with_length(config_from_hf(config_of("llama", rope).to_dict()), None)
        return config_to_hf(config, **to).get("max_position_embeddings")

    assert most("none") is None
    assert most("none", longest=77) == most("linear", longest=77) == 77
    assert most("dynamic", longest=77) == 16  # transformers takes the original length from there
    assert most("yarn", longest=32) == most("longrope", longest=32) == 64
    assert most("llama3", longest=500) == 500
    # and MiniCPM the factor
    assert config_to_hf(MINICPM4, longest=500)["max_position_embeddings"] == 64


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope.startswith("longrope")])
@pytest.mark.parametrize("longest", [None, 100])
def test_a_written_longrope_means_the_same_to_transformers_4(rope, longest):
    """Version 4.57 reads the original length outside of the scaling only, and computes the factor
    from the two lengths.
    """
    config = config_from_hf(config_of("llama", rope).to_dict())
    hf = config_to_hf(config, longest)
    said, lengths = hf["rope_scaling"], [hf["max_position_embeddings"]]
    lengths += [hf.get("original_max_position_embeddings", lengths[0])]
    growth = 1 + math.log(lengths[0] / lengths[1]) / math.log(lengths[1])
    scaling = config.rope_scaling
    found = said.get("attention_factor", math.sqrt(growth))
    assert found == pytest.approx(scaling.attention_scale, rel=1e-12)
    plain = rope_frequencies(8, 500.0)
    for length in LENGTHS:
        divisors = said["long_factor" if length > lengths[1] else "short_factor"]
        expected = scaling.frequencies(plain, 500.0, torch.tensor(length))
        assert torch.equal(plain / torch.tensor(divisors, dtype=torch.float64), expected)
    assert config_from_hf(hf) == with_length(config, lengths[0])


def test_minicpms_code_computes_the_tables_of_a_longrope_once(tmp_path):
    """For max_position_embeddings. The code of an exported MiniCPM computes them by length."""
    hf = config_to_hf(dataclasses.replace(MINICPM4, rope_scaling={**SCALING, "factor": 1.0}))
    del hf["architectures"]
    long = SCALING["long_factor"]
    for kind, most, once in (
        ("minicpm", 64, True),
        ("minicpm", ORIGINAL, False),
        ("minicpm_sala", 64, True),
        ("llama", 64, False),
    ):
        given = hf | {"model_type": kind, "max_position_embeddings": most}
        if kind == "minicpm_sala":
            given |= {**mixers_to_hf(MINICPM4), "mixer_types": ["minicpm4"] * 3}
        if kind == "llama":
            given = {name: value for name, value in given.items() if name not in SCALES}
        read = config_from_hf(given).rope_scaling
        assert list(read.long_factor) == long
        assert list(read.short_factor) == (long if once else SCALING["short_factor"])
    model = initialized(MINICPM4)
    save_weights(tmp_path, model.config, model.state_dict())
    assert HFWeights(tmp_path).config.rope_scaling == MINICPM4.rope_scaling
    sala = dataclasses.replace(MINICPM4, attention_gate=True)
    with pytest.raises(ValueError, match="minicpm_sala without rope_scaling=longrope with another"):
        config_to_hf(sala)
    once = {**SCALING, "short_factor": long}
    assert config_to_hf(dataclasses.replace(sala, rope_scaling=once))["rope_scaling"]


# Lengths: of a sequence that is cut over ranks, of documents, of rows, of what a cache holds.


def small(rope: str, **changes) -> CPMConfig:
    scaling = config_from_hf(config_of("llama", rope).to_dict()).rope_scaling
    return dataclasses.replace(SMALL, rope_theta=500.0, rope_scaling=scaling, **changes)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@pytest.mark.parametrize(
    ("ranks", "cuts"), [(1, (0, 7, 21, 30, 45)), (3, (0, 7, 8, 27, 45))], ids=["short", "long"]
)
def test_packed_documents_go_by_the_longest(rope, cuts, ranks, tmp_path):
    theirs = theirs_of("llama", rope)
    theirs.save_pretrained(tmp_path)
    mask, tokens = Mask.documents(cuts), tokens_of(45, rows=1)
    hidden = torch.zeros(45, 45).masked_fill(~mask.dense(), torch.finfo(torch.float32).min)
    expected = theirs(
        tokens, attention_mask=hidden[None, None], position_ids=mask.positions()[None]
    ).logits
    weights = load_cpm(tmp_path)
    layout = Layout.balanced(mask, ranks)

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, layout, process_group=ring)
        model = CPM(weights.config, sp)
        model.load_state_dict(weights.state_dict())
        return model(
            sp.shard(tokens), sp.shard(mask.positions(), 0), mask=mask, layout=layout
        ).detach()

    assert error(layout.unshard(simulate(ranks, work)), expected) < CLOSE


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_row_goes_by_its_own_longest_document(rope):
    model, tokens = initialized(small(rope)).requires_grad_(False), tokens_of(45)
    masks = Mask.documents((0, 12, 28, 36, 45)), Mask.causal(45)
    positions = torch.stack([mask.positions() for mask in masks])
    alone = [model(tokens[i : i + 1], positions[i], mask=masks[i]) for i in range(2)]
    together = model(tokens, positions, mask=masks)
    assert error(together, torch.cat(alone)) < CLOSE
    assert error(model(tokens[:1], torch.arange(45), mask=masks[0]), alone[0]) > 1e-3


@pytest.mark.parametrize("rope", ["dynamic", "yarn", "longrope"])
def test_generation_beyond_the_original_length_is_that_of_transformers(rope, tmp_path):
    """Keys stay in the cache as they were rotated when the sequence was shorter."""
    theirs = theirs_of("llama", rope)
    theirs.save_pretrained(tmp_path)
    ours, tokens = load_cpm(tmp_path).requires_grad_(False), tokens_of(20, rows=1)
    cache, past = Cache(None, ours.config.num_layers, 20), None
    for start, stop in ((0, 12), (12, 16), (16, 17), (17, 20)):
        step = theirs(tokens[:, start:stop], past_key_values=past, use_cache=True)
        past = step.past_key_values
        logits = ours(tokens[:, start:stop], torch.arange(start, stop), cache=cache)
        assert error(logits, step.logits) < CLOSE


def test_ranks_tell_each_other_the_longest():
    def work(sp):
        rows = torch.arange(3 * 2).view(3, 2) + sp.rank
        assert sp.longest(rows).equal(torch.tensor([4, 6, 8]))
        assert sp.longest(sp.positions(31)).equal(torch.tensor(31))
        with pytest.raises(ValueError, match=r"ranks differ in shape of longest"):
            sp.longest(torch.zeros(2 + sp.rank, 4, dtype=torch.int64))
        with pytest.raises((IndexError, RanksDisagree), match="non-zero size"):
            sp.longest(torch.zeros(2, sp.rank, dtype=torch.int64))
        for wrong in ([3], torch.tensor([127], dtype=torch.int8)):
            with pytest.raises((TypeError, RanksDisagree), match="positions must be"):
                sp.longest(sp.positions(31) if sp.rank else wrong)
        return True

    assert on_ranks(3, work) == [True] * 3
    assert SequenceParallel().longest(torch.tensor([[3, 0], [1, 7]])).tolist() == [4, 8]


def test_a_seed_oss_has_the_biases_and_heads_of_its_class_if_its_file_does_not_say():
    hf = config_of("seed_oss", "none").to_dict()
    for name in ("attention_bias", "attention_out_bias", "mlp_bias", "head_dim"):
        del hf[name]
    config = config_from_hf(hf)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    assert config.head_dim == SeedOssConfig().head_dim
    # as released, with dropouts
    dropouts = {"attention_dropout": 0.1, "residual_dropout": 0.1}
    assert config_from_hf({**hf, **dropouts}, accept=[*dropouts]) == config


# What is refused.


MINICPM = {"model_type": "minicpm"}
SCALES = {"scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 16}
OTHERS = [
    ("llama", {"model_type": "mixtral", "num_local_experts": 8}, "'mixtral', 'num_local_experts'"),
    ("llama", {"sparse_config": {"kernel_size": 32}}, "sparse_config"),
    ("llama", {**MINICPM, "use_mup": False}, "'use_mup': False"),
    ("llama", {**MINICPM, "mup_denominator": 40}, "'mup_denominator': 40"),
    ("llama", {**MINICPM, "no_rope": True}, "'no_rope': True"),
    ("llama", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping': 30.0"),
    ("llama", {**MINICPM, "scale_depth": 1.4, "scale_emb": 12}, "lacks ['dim_model_base']"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"layer_types": ["chunked_attention"] * 2}, "layer_types must be sliding_attention"),
    ("llama", {"layer_types": [SLIDING] * 2}, "layers of this llama a window"),
    ("qwen2, windows", {"sliding_window": None}, "must be a positive int, got None"),
    (
        "qwen2, windows",
        {"layer_types": None, "max_window_layers": None},
        "max_window_layers must be the number",
    ),
    ("qwen3, biases, windows", {"layer_types": [SLIDING]}, "for each of 2 layers"),
    ("llama", {**MINICPM, **SCALES, "sliding_window": 5}, "which layers of a minicpm have a"),
    ("mistral", {"use_sliding_window": False}, "'use_sliding_window': False"),
    ("mistral", {"layer_types": [FULL] * 2}, "which layers of a mistral have a window"),
    ("llama", {"rms_norm_eps": None}, "lacks ['rms_norm_eps']"),
    ("llama", {"attention_out_bias": True}, "unknown fields {'attention_out_bias': True}"),
    ("seed_oss", {"attention_out_bias": "yes"}, "attention_out_bias must be true or false, got"),
    ("seed_oss", {"residual_dropout": 0.1}, "training has no dropout here"),
]
BROKEN = [  # changes of rope_parameters
    ("yarn", {"rope_type": "proportional"}, "linear, dynamic, yarn, llama3, longrope, got 'prop"),
    ("yarn", {"mrope_section": [1, 1, 2]}, "have unknown fields ['mrope_section'"),
    ("yarn", {"factor": 0.5}, "factor of yarn must be at least 1, got 0.5"),
    ("yarn", {"factor": "4"}, "scaled by yarn: factor must be float, got '4'"),
    ("yarn", {"original_max_position_embeddings": -16}, "embeddings must be a positive int"),
    ("yarn", {"beta_fast": 0.5}, "beta_fast=0.5 of yarn must not be below beta_slow=1.0"),
    ("yarn", {"attention_factor": 0}, "attention_factor must be positive and finite, got 0"),
    ("yarn", {"mscale": "1", "mscale_all_dim": 1}, "mscale_all_dim must be finite numbers"),
    ("yarn", {"full_attention": {"rope_type": "default"}}, "must be the same for all layers, got"),
    ("yarn", {"rope_theta": 1}, "yarn needs a rope_theta above 1, got 1"),
    ("llama3", {"low_freq_factor": None}, "original_length: missing ['low_freq_factor']"),
    ("llama3", {"low_freq_factor": 5}, "high_freq_factor=4.0 of llama3 must be above low_freq"),
    ("longrope", {"long_factor": [1.0] * 5}, "must have 4 numbers for head_dim=8, got 5"),
    ("longrope", {"short_factor": [1.0, 0, 1, 1]}, "must be a list of positive numbers"),
]


@pytest.mark.parametrize(("family", "change", "message"), OTHERS)
def test_other_models_are_refused_by_name(family, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf({**config_of(family, "none").to_dict(), **change})


@pytest.mark.parametrize(("rope", "change", "message"), BROKEN)
def test_broken_scalings_are_refused_by_name(rope, change, message):
    hf = config_of("llama", rope).to_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf({**hf, "rope_parameters": {**hf["rope_parameters"], **change}})


OWN_FACTOR = {**SCALING, "attention_factor": 1.3}  # MiniCPM's own code would not read it
UNWRITTEN = [
    ({"qkv_bias": True, "window": 5}, "minicpm, minicpm_sala without window=5, qkv_bias=True"),
    ({"qk_norm": True, "o_bias": True}, "granite without o_bias=True, qk_norm=True"),
    ({"scale_emb": 1.0, "qk_norm": True, "mlp_bias": True}, "; qwen3 without mlp_bias=True"),
    ({"scale_emb": 1.0, "o_bias": True, "window": 5}, "ministral, smollm3 without o_bias"),
    ({"rope_scaling": OWN_FACTOR, "sparse": InfLLMV2()}, "instead of 1.22474, which follows"),
]


@pytest.mark.parametrize(("change", "message"), UNWRITTEN)
def test_what_no_model_there_is_like_is_not_written(change, message, tmp_path):
    scalings = {"scale_depth": None, "dim_model_base": None} if "scale_emb" in change else {}
    config = dataclasses.replace(SMALL, **change, **scalings)
    with pytest.raises(ValueError, match=re.escape(message)):
        save_weights(tmp_path / "out", config, {})
    assert not (tmp_path / "out").exists()


# The configuration.


PLAIN_YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}


def test_scalings_in_a_configuration_are_checked():
    dynamic = {"kind": "dynamic", "factor": 2.0, "original_length": 16}
    for scaling, message in (
        ({"kind": "su"}, "kind must be one of linear, dynamic, .*, got 'su'"),
        ({"kind": "linear"}, r"linear takes factor: missing \['factor'\]"),
        ({**PLAIN_YARN, "mscale": 1.0}, r"yarn takes factor, .*unknown \['mscale'\]"),
        ({**PLAIN_YARN, "original_length": 32.0}, "original_length must be int, got 32.0"),
        ("yarn", "expected RopeScaling or its names and values, got 'yarn'"),
        (dynamic, "dynamic needs a head_dim above 2"),
    ):
        with pytest.raises(ValueError, match=f"rope_scaling: {message}"):
            dataclasses.replace(SMALL, head_dim=2, rope_scaling=scaling)


def test_heads_that_do_not_divide_the_hidden_size_are_written_as_no_llama(tmp_path):
    """transformers' Llama refuses such heads."""
    config = CPMConfig(131, 44, 48, 2, 6, 2, 8)
    model, tokens = initialized(config).requires_grad_(False), tokens_of(9)
    save_weights(tmp_path / "out", config, model.state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert error(theirs(tokens).logits, model(tokens, torch.arange(9))) < CLOSE
    assert HFWeights(tmp_path / "out").config == config
    with pytest.raises(ValueError, match="qwen3 without mlp_bias=True"):
        config_to_hf(dataclasses.replace(config, mlp_bias=True, qk_norm=True))


EVERYTHING = dataclasses.replace(SMALL, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)


def test_biases_start_as_zeros_and_norms_as_ones_and_both_are_no_work():
    model = initialized(EVERYTHING)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert parameter.eq(0.0 if name.endswith("bias") else 1.0).all(), name
        else:
            assert 0.05 < parameter.std() < 0.11, name
    assert sum(p.numel() for p in model.parameters()) == EVERYTHING.num_parameters
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert vectors == EVERYTHING.num_vector_parameters
    assert step_flops(EVERYTHING, 100, 5050) == step_flops(SMALL, 100, 5050)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_go_to_hugging_face_and_back(preset):
    config = PRESETS[preset]
    hf = json.loads(json.dumps(config_to_hf(config)))
    kinds = dict.fromkeys(("cpm", "minicpm", "minicpm4", "minicpm4.1"), "minicpm")
    kinds |= {"qwen2.5": "qwen2", "qwen3": "qwen3"}
    kind = "minicpm_sala" if config.lightning_layers else kinds.get(preset.split("-")[0], "llama")
    assert hf["model_type"] == kind
    again = config_from_hf(hf)
    expected = with_length(config, hf.get("max_position_embeddings"))
    same = {"scale_depth": config.scale_depth, "init_std": config.init_std}
    assert dataclasses.replace(again, **same) == expected
    assert again.residual_scale == pytest.approx(config.residual_scale, rel=1e-15)
