"""Models of transformers whose attention is substituted as ring-flash-attention's adapter does,
over gloo.
"""

import re

import pytest
import torch
import torch.distributed as dist
from transformers import MistralConfig, MistralForCausalLM

from bmt_burst.compat.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
from tests.launcher import run_in_turn
from tests.reference import relative_error

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


def misuse(rank):
    model, tokens = made(), torch.ones(1, 8, dtype=torch.long)
    model.config._attn_implementation = "flash_attention_2"

    def fails(message, call, *args, **named):
        with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
            call(*args, **named)

    substitute_hf_flash_attn(None, 1)
    fails("call update_ring_flash_attn_params before a model", model, tokens)
    fails("cu_seqlens must be (0, ", update_ring_flash_attn_params, BOUNDS.flip(0), None)
    update_ring_flash_attn_params(BOUNDS, None)
    expected = "expected the 16 tokens of cu_seqlens in a row, got "
    fails(f"{expected}2 rows of 8 tokens on this rank of 2", model, tokens.expand(2, -1))
    fails(f"{expected}1 rows of 5 tokens on this rank of 2", model, tokens[:, :5])
    padding = {"attention_mask": (tokens.cumsum(1) < 8).long()}
    fails("does not support padding in attention_mask", model, tokens, **padding)
    fails("does not support is_causal=False", model, tokens, is_causal=False)
    fails("does not support sinks", model, tokens, s_aux=torch.ones(4))
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.1
    fails("expected dropout_p=0", model.train(), tokens)
    model.config.sparse_config = {"topk": 4}
    fails("does not support a sparse_config", model.eval(), tokens)


def test_logits_and_gradients_are_those_of_each_document_alone_and_wrong_calls_are_refused():
    _, errors_of_ranks = run_in_turn(2, misuse, of_a_model)
    for errors in errors_of_ranks:
        assert max(errors) < BOUND
