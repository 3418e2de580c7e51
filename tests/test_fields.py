"""Fields of config.json: published files are read, and no field that changes a result is dropped.

The files are repeated here as facts, from memory of the public folders and from public code.
"""

import functools
import json
import re
from pathlib import Path

import pytest

from models.hf_config import config_from_hf, config_to_hf
from models.huggingface import HFWeights, load_cpm, save_weights
from tests.refusals import refused_line
from tests.sala import RELEASED as SALA
from tests.test_model import SMALL, initialized
from train import evaluate
from train.generate import main as generate_main
from train.plan import main as plan_main
from train.settings.config import TrainConfig

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
# fmt: off
# fields of the configuration classes in transformers 4.57 and 5.24, with their defaults
CLASSES = {
    "transformers 4.57": {
        **dict.fromkeys(("add_cross_attention", "do_sample", "early_stopping"), False),
        **dict.fromkeys(("is_decoder", "is_encoder_decoder", "output_attentions"), False),
        **dict.fromkeys(("output_hidden_states", "output_scores", "remove_invalid_values"), False),
        **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "torchscript"), False),
        **dict.fromkeys(("tie_encoder_decoder", "use_bfloat16"), False),
        **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "finetuning_task"), None),
        **dict.fromkeys(("cross_attention_hidden_size", "decoder_start_token_id"), None),
        **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id"), None),
        **dict.fromkeys(("forced_eos_token_id", "pad_token_id", "prefix", "problem_type"), None),
        **dict.fromkeys(("sep_token_id", "suppress_tokens", "task_specific_params"), None),
        **dict.fromkeys(("tokenizer_class", "dtype"), None),
        **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
        **dict.fromkeys(("temperature", "top_p", "typical_p", "length_penalty"), 1.0),
        **dict.fromkeys(("chunk_size_feed_forward", "diversity_penalty", "min_length"), 0),
        **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), 0),
        "max_length": 20, "top_k": 50, "repetition_penalty": 1.0, "return_dict": True,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pruned_heads": {},
        "_name_or_path": "x", "_commit_hash": None, "pretraining_tp": 1,
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
    },
    "transformers 5.24": {
        "dtype": "bfloat16", "transformers_version": "5.24.0", "chunk_size_feed_forward": 0,
        "return_dict": True, "output_hidden_states": False, "is_encoder_decoder": False,
        "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": None, "is_causal": True,
    },
}
USUAL = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}
# fmt: on


def file_of(kind: str, name: str, *sizes: int, **more: object) -> dict:
    """Return a config.json of a model type, with the usual fields, and those of its family."""
    qwen = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
    family = {
        "llama": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        "mistral": {"sliding_window": None},
        "qwen2": qwen,
        "qwen3": {**qwen, "attention_bias": False, "head_dim": 128},
        "minicpm": {"auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}},
    }
    shape = dict(zip(SIZES, sizes, strict=True))
    named = {"model_type": kind, "architectures": [f"{name}ForCausalLM"]}
    return {**named, **USUAL, **family[kind], **shape, **more}


LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 8192}
SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "initializer_range": 0.1}
TIED = {"tie_word_embeddings": True}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32768}
LONG |= {name: [1.0 + i / 64 for i in range(64)] for name in ("long_factor", "short_factor")}
# files, with the numbers of parameters that their folders state, where these are known
PUBLISHED = {
    "Llama 2 7B": (
        file_of("llama", "Llama", 32000, 4096, 11008, 32, 32, 32, 4096, rope_scaling=None)
        | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096, "temperature": 0.9},
        6_738_415_616,
    ),
    "Llama 3.2 1B": (
        file_of("llama", "Llama", 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **TIED)
        | {"rope_scaling": {**LLAMA3, "factor": 32.0}, "rope_theta": 5e5},
        1_235_814_400,
    ),
    "unsloth's Llama 3.2 1B": (
        file_of("llama", "Llama", 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **TIED)
        | {"unsloth_fixed": True, "unsloth_version": "2025.12.5", "pad_token_id": 128004},
        1_235_814_400,
    ),
    "Mistral 7B": (
        file_of("mistral", "Mistral", 32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral Nemo": (
        file_of("mistral", "Mistral", 131072, 5120, 14336, 40, 32, 8, 128000, head_dim=128)
        | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        12_247_782_400,
    ),
    "Qwen2.5 0.5B": (
        file_of("qwen2", "Qwen2", 151936, 896, 4864, 24, 14, 2, 32768, use_mrope=False, **TIED)
        | {"sliding_window": 32768, "max_window_layers": 24, "rope_theta": 1e6},
        494_032_768,
    ),
    "Qwen3 0.6B": (
        file_of("qwen3", "Qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, rope_scaling=None, **TIED),
        596_049_920,
    ),
    "Qwen3 8B, written by transformers 4.57": (
        file_of("qwen3", "Qwen3", 151936, 4096, 12288, 36, 32, 8, 40960)
        | {"layer_types": ["full_attention"] * 36, "dtype": "bfloat16"},
        8_190_735_360,
    ),
    "SmolLM2 135M": (
        file_of("llama", "Llama", 49152, 576, 1536, 30, 9, 3, 8192, is_llama_config=True, **TIED)
        | {"rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        134_515_008,
    ),
    "DeepSeek Coder 1.3B": (
        file_of("llama", "Llama", 32256, 2048, 5504, 24, 16, 16, 16384, rope_theta=1e5)
        | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
        1_346_471_936,
    ),
    "Nanbeige 4.1 3B": (
        file_of("llama", "Llama", 166144, 2560, 10496, 32, 20, 4, 262144, head_dim=128)
        | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": 0},
        None,
    ),
    "MiniCPM 2B": (
        file_of("minicpm", "MiniCPM", 122753, 2304, 5760, 40, 36, 36, 4096, **SCALES, **TIED),
        2_724_880_896,
    ),
    "MiniCPM4 8B": (
        file_of("minicpm", "MiniCPM", 73448, 4096, 16384, 32, 32, 2, 32768, **SCALES)
        | {"rope_scaling": LONG, "eos_token_id": [2, 73440], "mup_denominator": 32},
        None,
    ),
    "MiniCPM-SALA": (SALA, 9_477_203_968),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    """Also with the fields that transformers' classes and programs add."""
    hf, parameters = PUBLISHED[name]
    config = config_from_hf(hf)
    assert parameters in (None, config.num_parameters)
    for more in CLASSES.values():
        assert config_from_hf({**more, **hf}) == config
    neutral = {"activation": "swiglu"}  # as in Falcon 3's
    neutral["auto_map"] = {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}
    for more in ({"a_new_switch": False}, {"a_new_size": None}, {"clip_qkv": None}, neutral):
        assert config_from_hf({**hf, **more}) == config


CHANGES = [
    ({"is_causal": False}, "{'is_causal': False} (tokens attend to later ones)"),
    ({"use_bidirectional_attention": True}, "{'use_bidirectional_attention': True} (tokens"),
    ({"clip_qkv": 8.0}, "{'clip_qkv': 8.0} (q, k and v are clipped)"),
    ({"embedding_multiplier": 12.0, "logits_scaling": 8.0}, "'logits_scaling': 8.0} (results are"),
    ({"attention_multiplier": 0.0078125}, "'attention_multiplier': 0.0078125"),
    ({"residual_multiplier": 0.22}, "'residual_multiplier': 0.22"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized: give them in 16"),
    ({"hidden_act": "fatrelu"}, "{'hidden_act': 'fatrelu'}"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_field_that_changes_the_computation_is_refused(change, message):
    """No option accepts it. At its class's default it is read."""
    hf, _ = PUBLISHED["Qwen3 0.6B"]
    for accept in ((), tuple(change)):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            config_from_hf({**hf, **change}, accept)
        assert str(refused.value).startswith("expected a qwen3 that CPM computes, got unsup")
    neutral = {"is_causal": True, "embedding_multiplier": 1.0, "attention_multiplier": None}
    assert config_from_hf({**hf, **neutral}) == config_from_hf(hf)


UNKNOWN = {
    "rope_ratio": 8,
    "scale_emb": 12,  # of a MiniCPM
    "qk_norm": True,  # of a MiniCPM-SALA
    "attention_dropout": 0.1,
    "a_new_list": [],
    # of other code, such as gte-Qwen2's, whose tokens attend to later ones
    "auto_map": {"AutoModel": "modeling_both.Model"},
    "architectures": ["LlamaEncoderModel"],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_field_is_refused_unless_it_is_accepted_by_name(name):
    hf, _ = PUBLISHED["Llama 3.2 1B"]
    given, other = {**hf, name: UNKNOWN[name]}, {"another": "one"}
    expected = f"unknown fields {{'{name}': {UNKNOWN[name]}}} may change .* --accept-field {name}"
    with pytest.raises(ValueError, match=re.escape(expected).replace(r"\.\*", ".*")):
        config_from_hf(given)
    assert config_from_hf(given, (name,)) == config_from_hf(hf)
    with pytest.raises(ValueError, match=r"unknown fields {'another': 'one'} may"):
        config_from_hf({**given, **other}, (name,))
    with pytest.raises(ValueError, match="--accept-field another: expected a field of config"):
        config_from_hf(given, (name, "another"))
    for known in ("num_hidden_layers", "torch_dtype", "eos_token_id"):
        with pytest.raises(ValueError, match=f"--accept-field {known}: expected an unknown field"):
            config_from_hf(given, (name, known))


def test_rotary_positions_have_no_unknown_fields():
    hf, _ = PUBLISHED["Llama 2 7B"]
    for rope in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}):
        given = {**hf, "rope_parameters": {**rope, "mrope_section": [16, 24, 24]}}
        message = (
            rf"of kind '{rope['rope_type']}' have unknown fields \['mrope_section'\]: if these"
        )
        with pytest.raises(ValueError, match=message):
            config_from_hf(given)
        neutral = {**rope, "mrope_section": None, "mrope_interleaved": False}
        expected = config_from_hf({**hf, "rope_parameters": rope})
        assert config_from_hf({**hf, "rope_parameters": neutral}) == expected


def with_a_field(folder: Path) -> Path:
    save_weights(folder, SMALL, initialized(SMALL).state_dict(), rope_ratio=8)
    return folder


def test_every_reader_of_a_folder_takes_accepted_fields(tmp_path):
    folder = with_a_field(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf/config\.json: unknown fields {'rope_ratio': 8} may"):
        HFWeights(folder)
    assert load_cpm(folder, accept=["rope_ratio"]).config == config_from_hf(config_to_hf(SMALL))
    for model in ({"init_from": str(folder)}, {"model": str(folder / "config.json")}):
        with pytest.raises(ValueError, match="give --accept-field rope_ratio"):
            TrainConfig(**model).model_config()
        config = TrainConfig(**model, accept_field="rope_ratio")
        assert config.model_config().hidden_size == SMALL.hidden_size
        assert config.accepted_fields() == {"rope_ratio": 8}
    (tmp_path / "own.json").write_text(json.dumps(SMALL.to_dict()))
    with pytest.raises(ValueError, match=r"--accept-field rope_ratio: expected a field of .*own\."):
        TrainConfig(model=str(tmp_path / "own.json"), accept_field="rope_ratio").model_config()
    for model in ({}, {"model": "cpm-tiny", "init_from": "weights.pt"}):
        with pytest.raises(ValueError, match="--accept-field needs --init-from FOLDER or --model"):
            TrainConfig(**model, accept_field="rope_ratio")
    assert TrainConfig().accepted_fields() == {}
    with pytest.raises(ValueError, match=r"--accept-field must name fields of .*, got ' ,'"):
        TrainConfig(init_from=str(folder), accept_field=" ,")


def test_programs_take_accepted_fields(tmp_path, capsys):
    """With it, generate.py and plan.py go on to the next fault."""
    folder = ["--init-from", str(with_a_field(tmp_path / "hf"))]
    refusal = functools.partial(refused_line, capsys)
    accept = ["--accept-field", "rope_ratio"]
    assert "give --accept-field rope_ratio" in refusal(generate_main, *folder)
    assert "has no tokenizer.json or tokenizer.mod" in refusal(generate_main, *folder, *accept)
    plan = [*folder, "--gpus", "1"]
    assert "give --accept-field rope_ratio" in refusal(plan_main, *plan)
    message = "--accept-field another: expected a field of config.json"
    assert message in refusal(plan_main, *plan, "--accept-field", "rope_ratio, another")
    request = evaluate._parse([*folder, *accept, "--tasks", "needle", "--lengths", "64"])
    assert request.settings["accept_field"] == "rope_ratio"
    for program in (generate_main, evaluate._parse):
        message = "--accept-field is for --init-from, got --run"
        assert message in refusal(program, "--run", str(tmp_path), *accept)
