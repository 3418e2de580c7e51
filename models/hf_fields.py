"""Fields of config.json that `hf_config.py` does not read, in one table.

A field is harmless, or refused if it has another value than those at which it does nothing, or
unknown. An unknown one passes if it is null or false. Otherwise the user must accept it by name.
To serve a new release, add its fields here, or read them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

# Fields that change no logits, whatever their value: those of the configurations in transformers
# 4.57 and 5.24, those for generation, and those of programs, kernels and tokenizers.
_OF_TRANSFORMERS = """
    base_model_pp_plan base_model_tp_plan chunk_size_feed_forward custom_pipelines dtype
    finetuning_task gradient_checkpointing id2label initializer_range is_decoder label2id
    name_or_path num_labels output_attentions output_hidden_states pretraining_tp problem_type
    return_dict task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
    torchscript use_bfloat16 use_cache
"""
_OF_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty generation_config
    length_penalty max_length max_new_tokens min_length min_new_tokens min_p no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_OF_PROGRAMS = """
    attn_implementation is_llama_config max_seq_len max_sequence_length model_max_length
    neftune_noise_alpha seq_length shift_labels tokenizer_model_max_length transformers.js_config
    use_flash_attention use_flash_attention_2 use_flash_attn use_fused_rms_norm use_fused_rope
    use_recompute use_sdpa virtual_pp_degree z_loss_weight
"""
_HARMLESS = frozenset((_OF_TRANSFORMERS + _OF_GENERATION + _OF_PROGRAMS).split())
# private fields of transformers, versions of programs, and tokens
_HARMLESS_NAMES = re.compile(r"^_|^unsloth_|_version$|_token_ids?$")

# Values at which a field does nothing. The user may accept it at others. Training has no dropout.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "pruned_heads": ({},),
    "scale_emb": (1,),
    "activation": ("silu", "swiglu"),  # besides hidden_act
}
_DROPOUT = re.compile(r"dropout|_pdrop$")

_OFF: tuple[Any, ...] = (False, [], {})
_OTHER_HEADS = "attention scores are computed otherwise"
_EXPERTS = "it is a mixture of experts"
_GRANITE = "results are multiplied by it"
_LATER = "tokens attend to later ones"
_QUANTIZED = "the weights are quantized: give them in 16 or 32 bits"
_UNROTATED = "layers lack rotary positions"
# What no option accepts: values at which it does nothing, and what it does at others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((True,), _LATER),
    "use_bidirectional_attention": (_OFF, _LATER),
    "clip_qkv": (_OFF, "q, k and v are clipped"),
    **dict.fromkeys(("attn_logit_softcapping", "query_pre_attn_scalar"), (_OFF, _OTHER_HEADS)),
    "final_logit_softcapping": (_OFF, "logits are capped"),
    "use_qk_norm": (_OFF, "q and k are normalized"),
    "alibi": (_OFF, "attention has a bias by distance"),
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        ((1,), _GRANITE),
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (_OFF, _EXPERTS)),
    **dict.fromkeys(("no_rope", "no_rope_layers"), (_OFF, _UNROTATED)),
    **dict.fromkeys(
        ("quantization_config", "quantization", "compression_config"), (_OFF, _QUANTIZED)
    ),
}


def find_refused(hf: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a config.json without its nulls that CPM does not compute, each with
    what it does.
    """
    given = {name: _REFUSED[name] for name in _REFUSED if name in hf}
    return {name: does for name, (neutral, does) in given.items() if hf[name] not in neutral}


def check_unknown(hf: dict[str, Any], read: Collection[str], accept: Collection[str]) -> None:
    """Raise ValueError for unknown fields of a config.json that are not accepted.

    hf      names and values
    read    names of fields that are read
    accept  names of fields that the user accepts. All must be in the file, and unknown
    """
    if missing := sorted(set(accept) - hf.keys()):
        raise ValueError(f"--accept-field {','.join(missing)}: expected a field of config.json")
    if known := sorted(name for name in accept if name in read or _never_matters(name)):
        raise ValueError(
            f"--accept-field {','.join(known)}: expected an unknown field, and not one that is "
            "read or changes nothing"
        )
    unknown = {
        name: value
        for name, value in hf.items()
        if name not in read and name not in accept and not _is_harmless(name, value)
    }
    if unknown:
        dropout = any(map(_DROPOUT.search, unknown))
        raise ValueError(
            f"unknown fields {unknown} may change what the model computes: if they do not, give "
            f"--accept-field {','.join(unknown)}{'; training has no dropout here' * dropout}"
        )


def _never_matters(name: str) -> bool:
    """Whether a field changes no logits, whatever its value."""
    return name in _HARMLESS or bool(_HARMLESS_NAMES.search(name))


def _is_harmless(name: str, value: Any) -> bool:
    if value is None or value is False or _never_matters(name):
        return True
    if name in _REFUSED:
        return value in _REFUSED[name][0]
    return value in ((0,) if _DROPOUT.search(name) else _DEFAULTS.get(name, ()))
