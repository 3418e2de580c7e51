"""MiniCPMs for transformers: a folder brings code that computes what was trained."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from bmt_burst import Cache, InfLLMV2
from models.cpm import CPM
from models.huggingface import save_weights
from tests.test_model import SMALL, initialized

SPARSE = InfLLMV2(block_size=4, kernel_size=4, kernel_stride=2, window_size=8, topk=3, dense_len=-1)
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 7.5]}
PROMPT, TOKENS = 41, 49

pytestmark = pytest.mark.usefixtures("modules_in_a_folder")


def model_of(**change) -> CPM:
    """A model whose tokens attend to few others, so that the choice of blocks matters."""
    model = initialized(dataclasses.replace(SMALL, **change)).double().eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
    return model


def loaded(model: CPM, folder, **settings) -> torch.nn.Module:
    save_weights(folder, model.config, model.state_dict(), torch.float64, 77, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@torch.no_grad()
def decoded(model: CPM, tokens: torch.Tensor) -> torch.Tensor:
    """Our logits of a prompt, and of one token after the other."""
    cache, positions = Cache(None, model.config.num_layers, tokens.shape[1]), torch.arange(TOKENS)
    parts = [slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, TOKENS))]
    return torch.cat([model(tokens[:, p], positions[p], cache=cache) for p in parts], 1)


@torch.no_grad()
def decoded_by(theirs: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same by transformers, whose later versions call past_key_values a cache."""
    name = "past_key_values"
    cache, logits = None, []
    for part in (slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, TOKENS))):
        out = theirs(tokens[:, part], use_cache=True, **({name: cache} if cache else {}))
        name = "cache" if "cache" in out else name
        cache, logits = out[name], [*logits, out.logits]
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": False, "scale_emb": 0.3, "scale_depth": 0.7, "dim_model_base": 24},
        {"num_heads": 3, "num_kv_heads": 1, "scale_depth": None, "dim_model_base": None},
        {"rope_scaling": {"kind": "longrope", "original_length": PROMPT + 2, **FACTORS}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 16}},
        {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 16}},
        {"sparse": SPARSE, "num_kv_heads": 1},
        {"sparse": dataclasses.replace(SPARSE, use_nope=True), "tie_embeddings": False},
        {"sparse": dataclasses.replace(SPARSE, dense_len=PROMPT + 3, init_blocks=2)},
    ],
    ids=str,
)
def test_transformers_computes_our_logits_of_prompts_and_of_later_tokens(tmp_path, change):
    model = model_of(**change)
    theirs = loaded(model, tmp_path / "folder")
    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (1, TOKENS))
    later = decoded(model, tokens)
    assert (decoded_by(theirs, tokens) - later).abs().max() < 1e-5 * later.abs().max()
    whole = model(tokens, torch.arange(TOKENS)).detach()
    assert (theirs(tokens).logits - whole).abs().max() < 1e-5 * whole.abs().max()
    if model.config.sparse:
        dense = initialized(dataclasses.replace(model.config, sparse=None)).double()
        dense.load_state_dict(model.state_dict())
        assert (dense(tokens, torch.arange(TOKENS)) - whole).abs().max() > 1e-3 * whole.abs().max()


@pytest.mark.parametrize("sparse", [None, SPARSE], ids=str)
def test_padded_rows_are_generated_as_they_are_alone(tmp_path, sparse):
    """Also by a copy that transformers saved, which brings the code along."""
    theirs = loaded(model_of(sparse=sparse), tmp_path / "folder", bos_token_id=1, eos_token_id=299)
    theirs.save_pretrained(tmp_path / "again")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    torch.manual_seed(0)
    rows = [torch.randint(0, 299, (1, count)) for count in (PROMPT, 33)]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 299}
    alone = [theirs.generate(row, **options)[:, row.shape[1] :] for row in rows]
    lacking = [PROMPT - row.shape[1] for row in rows]
    batch = torch.cat(
        [torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, lacking, strict=True)]
    )
    mask = torch.arange(PROMPT) >= torch.tensor(lacking).unsqueeze(1)
    together = theirs.generate(batch, attention_mask=mask.long(), **options)
    assert together[:, PROMPT:].equal(torch.cat(alone))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"position_ids": torch.arange(30).view(1, 30) % 20}, "one sequence a row"),
        ({"attention_mask": (torch.arange(30).view(1, 30) != 7).long()}, "padding only at sides"),
        ({"attention_mask": torch.ones(1, 1, 30, 30, dtype=torch.bool)}, "as with a dynamic cache"),
    ],
)
def test_a_sparse_model_refuses_what_it_would_compute_wrongly(tmp_path, seen, problem):
    theirs = loaded(model_of(sparse=SPARSE), tmp_path / "folder")
    with pytest.raises(ValueError, match=problem):
        theirs(torch.zeros(1, 30, dtype=torch.long), **seen)
