"""Models of transformers whose attention is substituted as ring-flash-attention's adapter does,
over gloo.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from bmt_burst.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
from tests.helpers import relative_error, run_ranks
from tests.sparse import llama_config
from tests.test_sparse import SMALL as SPARSE

BOUND = 1e-5  # rounding of fp32, through two layers
LENGTHS = (7, 1, 8)  # of documents, that two ranks share
BOUNDS = torch.tensor([0, 7, 8, 16], dtype=torch.int32)


def made():
    """A model with a window, narrower than documents. Without flash-attn transformers refuses to
    ask for it.
    """
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        initializer_range=0.2,  # so that attention is far from a mean
        attn_implementation="eager",
    )
    return MistralForCausalLM(config)


def of_a_model(rank):
    """Errors of this rank's logits and of the ranks' gradients together; documents were computed
    alone before.
    """
    model, documents = made(), [torch.randint(1, 64, (1, length)) for length in LENGTHS]
    whole = torch.cat([model(input_ids=document).logits for document in documents], 1)
    dlogits = torch.randn_like(whole)
    exact = torch.autograd.grad(whole, list(model.parameters()), dlogits)
    model.config._attn_implementation = "flash_attention_2"
    group = dist.new_group(range(2))
    substitute_hf_flash_attn(group, heads_k_stride=1)
    update_ring_flash_attn_params(BOUNDS, group)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    own = [x.chunk(2, 1)[rank] for x in (torch.cat(documents, 1), positions, dlogits, whole)]
    out = model(input_ids=own[0], position_ids=own[1]).logits
    grads = torch.autograd.grad(out, list(model.parameters()), own[2])
    for grad in grads:
        dist.all_reduce(grad)
    return [relative_error(x, y) for x, y in zip([out, *grads], [own[3], *exact], strict=True)]


def test_logits_and_gradients_are_those_of_each_document_alone():
    for found in run_ranks(2, of_a_model):
        assert max(found) < BOUND


def two_forwards_before_backwards(rank):
    """Errors of the gradients of two forwards of a sparse model with checkpointing. Both have the
    documents of one update, or each has an update of its own.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(SPARSE, attn_implementation="eager")).train()
    model.config._attn_implementation = "flash_attention_2"
    group = dist.new_group([0])
    substitute_hf_flash_attn(group, heads_k_stride=1)
    bounds, positions = torch.tensor([0, 64], dtype=torch.int32), torch.arange(64)[None]
    tokens = torch.randint(1, 40, (2, 1, 64))

    def gradients(updates):
        sums = []
        for row in tokens:
            if updates or not sums:
                update_ring_flash_attn_params(bounds, group)
            sums.append(model(input_ids=row, position_ids=positions, use_cache=False).logits.sum())
        return [torch.autograd.grad(x, list(model.parameters())) for x in sums]

    exact = gradients(updates=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return [
        relative_error(mine, theirs)
        for updates in (True, False)
        for pair in zip(gradients(updates), exact, strict=True)
        for mine, theirs in zip(*pair, strict=True)
    ]


def test_forwards_of_sparse_models_keep_their_own_choices():
    [errors] = run_ranks(1, two_forwards_before_backwards)
    assert max(errors) < BOUND


def misuse(rank):
    model, tokens = made(), torch.ones(1, 8, dtype=torch.long)
    model.config._attn_implementation = "flash_attention_2"
    alone = [dist.new_group([member]) for member in range(2)][rank]
    said = []

    def fails(call, *args, **named):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call(*args, **named)
        said.append(str(error.value))

    fails(update_ring_flash_attn_params, BOUNDS, None)
    substitute_hf_flash_attn(None, 1)
    fails(model, tokens)
    fails(update_ring_flash_attn_params, BOUNDS, alone)
    fails(update_ring_flash_attn_params, BOUNDS[:2], None)
    fails(update_ring_flash_attn_params, BOUNDS.flip(0), None)
    update_ring_flash_attn_params(BOUNDS, None)
    fails(model, tokens.expand(2, -1))
    fails(model, tokens, attention_mask=(tokens.cumsum(1) < 8).long())
    fails(model, tokens[:, :5])
    fails(model, tokens, is_causal=False)
    return said


def test_what_is_wrong_is_said():
    expected = [
        "call substitute_hf_flash_attn first",
        "call update_ring_flash_attn_params before a model",
        "got one where it is rank 0 of 1",
        "the 7 tokens of cu_seqlens do not divide by 2 ranks",
        "cu_seqlens must rise",
        "packed in one row, (1, tokens), got 2 rows",
        "attention_mask has padding",
        "ends at 16, which is 8 tokens for each of 2 ranks: this rank has 5",
        "attention to both sides is not substituted",
    ]
    for said in run_ranks(2, misuse):
        for line, part in zip(said, expected, strict=True):
            assert part in line
