"""Names of weights: which program wrote a file, and our names for its names.

| looks like | names |
| --- | --- |
| Hugging Face, or a file of this project | model.embed_tokens.weight, embed_tokens.weight |
| ModelCenter's Llama | input_embedding.weight, no table of biases |
| CPM-Live's CPM-Bee, or behind cpmbee. | the same, position_bias.relative_attention_bias |
| CPM-Live's CPM-Ant | as CPM-Bee, prompt_embedding, segment_embedding |

"module." and "_orig_mod." of DistributedDataParallel and torch.compile are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

_WRAPPED = re.compile(r"(module\.|_orig_mod\.)*")
TABLE = "position_bias.relative_attention_bias"
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.")

# ModelCenter's names of a Llama's modules, outside and inside of layers, and ours
_OUTSIDE = {
    "input_embedding": "embed_tokens",
    "encoder.output_layernorm": "norm",
    "output_projection": "lm_head",
}
_INSIDE = {
    "self_att.layernorm_before_attention": "input_layernorm",
    "self_att.self_attention.project_q": "self_attn.q_proj",
    "self_att.self_attention.project_k": "self_attn.k_proj",
    "self_att.self_attention.project_v": "self_attn.v_proj",
    "self_att.self_attention.attention_out": "self_attn.o_proj",
    "ffn.layernorm_before_ffn": "post_attention_layernorm",
    "ffn.ffn.w_in.w_0": "mlp.gate_proj",
    "ffn.ffn.w_in.w_1": "mlp.up_proj",
    "ffn.ffn.w_out": "mlp.down_proj",
}

# A pattern that one of a file's names has, what the file then looks like, and what to do.
_NOTHING = "it is not supported"
_OTHERS = (
    (r"\blora_[AB]\b", "an adapter (LoRA)", "merge it into its model, as peft's merge_and_unload"),
    (
        r"\b(qweight|qzeros|weight_scale\w*|absmax|SCB)\b",
        "quantized weights",
        "give the weights in 16 or 32 bits",
    ),
    (r"\bexperts\.", "a mixture of experts", _NOTHING),
    (
        r"^cpmant\.",
        "transformers' CpmAnt, into whose weights CPM-Live's scalings are folded",
        "give CPM-Live's own file",
    ),
    (
        r"^(tok_embeddings\.|.*\battention\.w[qkvo]\.)",
        "Meta's files of a Llama",
        "convert them with transformers' convert_llama_weights_to_hf.py",
    ),
    (
        r"\b(linear_qkv|query_key_value)\b|^language_model\.(encoder|embedding)\.",
        "Megatron-LM's or GPT-NeoX's weights",
        "convert a Llama to Hugging Face's format first; other models are not supported",
    ),
    (r"^(transformer\.)?h\.\d+\.", "a GPT-2 or a relative of it", _NOTHING),
    (r"^(language_model|vision_\w+|visual)\.", "a model of images and text", _NOTHING),
    (
        r"^(position_bias_(enc|dec)|decoder\.layers\..*cross_att)\b",
        "ModelCenter's CPM2 or T5, which have an encoder and a decoder",
        _NOTHING,
    ),
    (
        r"^(position_embedding|token_type_embedding|block_position_embedding)\.",
        "a model of ModelCenter with learned positions (GPT2, OPT, GLM, Bert)",
        _NOTHING,
    ),
)
_KNOWN = (
    "Hugging Face's names (model.embed_tokens.weight), ModelCenter's of a Llama or CPM-Live's "
    "(input_embedding.weight)"
)


@dataclass(frozen=True)
class Origin:
    """The program that wrote weights.

    name    what the weights look like
    kind    the kind of model that reads them: cpm, cpm-bee or cpm-ant
    ours    returns our name of a weight that has this name in the file
    theirs  returns the name for messages of a weight that has this name here
    """

    name: str
    kind: str
    ours: Callable[[str], str]
    theirs: Callable[[str], str]


def find_origin(names: Collection[str], source: object) -> Origin:
    """Find the program that wrote the weights called `names` in `source`, or raise ValueError,
    which says what they look like.
    """
    if not names:
        raise ValueError(f"{source} has no weights")
    found = {_unwrap(name) for name in names}
    for pattern, looks_like, advice in _OTHERS:
        if seen := next((name for name in sorted(found) if re.search(pattern, name)), None):
            raise ValueError(
                f"{source} looks like {looks_like} ({seen}), expected {_KNOWN}: {advice}"
            )
    for prefix in ("", "model."):
        if f"{prefix}embed_tokens.weight" in found:
            return _prefixed("Hugging Face's weights", "cpm", prefix)
    for prefix in ("", "cpmbee."):
        if f"{prefix}input_embedding.weight" in found:
            return _openbmb({name.removeprefix(prefix) for name in found}, source, prefix)
    raise ValueError(f"{source} has unknown names, {sorted(found)[:3]}, expected {_KNOWN}")


def layers_of(names: Collection[str]) -> set[int]:
    """Return the numbers of the layers that have weights."""
    return {int(match[2]) for match in map(_LAYER.match, names) if match}


def _unwrap(name: str) -> str:
    return _WRAPPED.sub("", name, count=1)


def _openbmb(found: Collection[str], source: object, prefix: str) -> Origin:
    """Tell models of OpenBMB apart, whose layers have the same names."""
    if TABLE not in found:
        return Origin(
            "ModelCenter's Llama",
            "cpm",
            lambda name: _translate(_unwrap(name).removeprefix(prefix), _INSIDE, _OUTSIDE),
            _to_model_center,
        )
    prompts = "prompt_embedding.weight" in found
    if prompts and "segment_embedding.weight" in found:
        return _prefixed("CPM-Live's CPM-Ant", "cpm-ant", prefix)
    other = "CPM3" if prompts else "CPM1" if "output_projection.weight" in found else None
    if other:
        raise ValueError(
            f"{source} looks like ModelCenter's {other}, expected {_KNOWN}: its scores have a "
            f"learned bias by distance ({TABLE}) and its feed-forward has GELU, where a dense CPM "
            "has rotary positions and SiLU; it is not supported"
        )
    return _prefixed("CPM-Live's CPM-Bee (or ModelCenter's tied CPM1)", "cpm-bee", prefix)


def _prefixed(name: str, kind: str, prefix: str) -> Origin:
    """Return an origin with our names behind a prefix, which messages leave out."""
    return Origin(
        name, kind, lambda theirs: _unwrap(theirs).removeprefix(prefix), lambda ours: ours
    )


def _translate(name: str, inside: dict[str, str], outside: dict[str, str]) -> str:
    """Translate the module in a parameter's name, which stands in `inside` if it is of a layer."""
    module, _, parameter = name.rpartition(".")
    layer = re.fullmatch(r"(?:encoder\.)?layers\.(\d+)\.(.+)", module)
    if layer is None:
        return f"{outside.get(module, module)}.{parameter}"
    return f"layers.{layer[1]}.{inside.get(layer[2], layer[2])}.{parameter}"


def _to_model_center(name: str) -> str:
    inside, outside = ({ours: theirs for theirs, ours in t.items()} for t in (_INSIDE, _OUTSIDE))
    return ("encoder." if name.startswith("layers.") else "") + _translate(name, inside, outside)
