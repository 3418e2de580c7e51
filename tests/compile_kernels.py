"""Compiles the Triton kernels, as they are launched, for a GPU that need not be there. Run by
test_triton.py, in one process, as its imports take seconds.

Attention is compiled with a softcap, with a bias by segments and with one by distance, for a head
size that is padded and a band of two edges, so that every branch is compiled.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bmt_burst import InfLLMV2, kernels
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.kernels import triton as with_bias
from bmt_burst.bias.kernels import triton_terms
from bmt_burst.blocks import tiles, triton_far
from bmt_burst.blocks.far import FarBlocks, FarKeys
from bmt_burst.fused import triton_passes
from bmt_burst.kernels import triton_blocks, triton_few_queries
from bmt_burst.lightning import triton_blocks as lightning_blocks
from bmt_burst.lightning import triton_kernel as lightning
from bmt_burst.lightning.rates import find_rates
from bmt_burst.lightning.segments import Segments
from bmt_burst.merging import fused
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.sparse import triton_choice, triton_decoding
from bmt_burst.sparse.compressed import CompressedKeys
from bmt_burst.sparse.queries import Choosers
from bmt_burst.spec import Spec
from tests.cases import call_tensors, random_bias
from tests.compiler import Compiler
from train.engine import triton_adamw
from train.engine.adamw import Update

SPARSE = {
    tiles: ("_sort_keys", "_unite"),
    triton_far: ("_forward", "_dq", "_dkdv", "_add_parts"),
    triton_choice: ("_normalize", "_fill_scores", "_take"),
}
LIGHTNING = "sum_pieces", "chain_states", "attend", "attend_back"


def compile_attention():
    for name in ("forward", "backward_kv", "backward_q"):
        setattr(triton_blocks, name, Compiler(getattr(triton_blocks, name)))
    triton_terms.backward_table = Compiler(triton_terms.backward_table)
    for tokens in (40, 48, 41):  # compiled once for all of them
        call = KernelCall(tokens, tokens, (((0, tokens), (0, tokens)),), 30, 0)
        *qkv, dout = call_tensors(call, 1, 4, 2, 24, torch.bfloat16)
        by_segments = random_bias(call, 4, dtype=torch.float32)
        by_segments = replace(by_segments, segments=replace(by_segments.segments, other=3))
        by_distance = replace(by_segments, segments=None)
        for bias, softcap in ((None, 20.0), (by_segments, None), (by_distance, None)):
            spec, added = Spec(0.3, softcap=softcap), () if bias is None else (bias,)
            kernel = (kernels if bias is None else bias_kernels).load("triton")
            out, lse = kernel.forward(*qkv, call, spec, *added)
            kernel.backward(dout, *qkv, out, lse, None, call, spec, *added)
        with_bias.table_gradient(dout, *qkv, out, lse, None, call, Spec(0.3), by_segments)


def compile_few_queries():
    """Compile the kernels of new tokens for the oldest GPUs."""
    for name in ("_put", "_attend", "_merge"):
        kernel = Compiler(getattr(triton_few_queries, name), capability=80)
        setattr(triton_few_queries, name, kernel)
    for tokens, kept in ((1, 40), (2, 41), (4, 48)):  # compiled once for all of them
        q, k, kept_k = (
            torch.zeros(1, count, heads, 24, dtype=torch.bfloat16)
            for count, heads in ((tokens, 6), (tokens, 2), (kept, 2))
        )
        numbers = torch.zeros(tokens, 2, dtype=torch.int64)
        triton_few_queries.put(k, k, kept_k, kept_k, numbers[:, 0])
        parts = triton_few_queries.attend(q, kept_k, kept_k, numbers, Spec(0.3, softcap=20.0))
        triton_few_queries.merge(parts, q, torch.zeros(q.shape[:3]))


def compile_decoding():
    """Compile the kernels of new tokens with sparse attention."""
    for name in ("_add_keys", "_attend_to_blocks"):
        kernel = Compiler(getattr(triton_decoding, name), capability=80)
        setattr(triton_decoding, name, kernel)
    for tokens, kept in ((1, 160), (2, 161)):  # compiled once for both
        q, k, kept_k = (
            torch.zeros(1, count, heads, 24, dtype=torch.bfloat16)
            for count, heads in ((tokens, 6), (tokens, 2), (kept, 2))
        )
        keys = triton_decoding.DecodingKeys(None, k, kept, InfLLMV2())
        first = torch.zeros(2, dtype=torch.int64)[tokens - 1 : tokens]
        keys.extend(k, first)
        at_hand = triton_decoding.KeysAtHand.of(torch.arange(kept), kept, 64)
        keys.attend(q, q, kept_k, kept_k, at_hand, first, {}, Spec(0.3, softcap=20.0))


def compile_fused():
    """Compile the fused kernels for the oldest GPUs, of capability 8.0."""
    for name in ("_merge_outputs", "_sum_gradients", "_fill_lse_delta"):
        setattr(fused, name, Compiler(getattr(fused, name), capability=80))
    for tokens, start in ((32, 16), (33, 1), (40, 0), (47, 3)):  # compiled once for all of them
        wide = torch.zeros(1, tokens, 2, 80)
        half = torch.zeros(1, tokens - start, 2, 80, dtype=torch.bfloat16)
        lse = torch.zeros(1, 2, tokens)
        for spans in ([(start, tokens)], [(0, start), (2 * start, tokens)]):
            fused.merge_outputs(
                wide, lse, [([(0, tokens)], wide, lse), (spans, half, lse[..., start:])]
            )
            fused.sum_gradients(wide, [([(0, tokens)], wide), (spans, half)])
        rows = torch.zeros(1, tokens - start, 2, 2 + 2 * (start % 2))
        fused.fill_lse_delta(rows, half, half, lse[..., start:])


def compile_passes():
    """Compile the passes of a block."""
    for name in ("_rotate_pairs", "_gate", "_gate_gradients", "_normalize", "_norm_gradients"):
        setattr(triton_passes, name, Compiler(getattr(triton_passes, name), capability=80))
    for tokens in (32, 16):  # compiled once for both
        x, weight = torch.zeros(1, tokens, 2, 48, dtype=torch.bfloat16), torch.zeros(48)
        table, r = torch.zeros(tokens, 24), torch.zeros(1, tokens, 2)
        triton_passes.rotate(x, table, table)
        triton_passes.normalize(x, weight, 1e-6)
        triton_passes.norm_gradients(x, x, weight, r, x)
        triton_passes.gate(x, x)
        triton_passes.gate_gradients(x, x, x, again=True)


def compile_losses():
    """Compile the pass over logits, alone and with their gradients."""
    kernel = Compiler(triton_passes._compute_losses, capability=80)
    triton_passes._compute_losses = kernel
    for tokens, columns, start in ((16, 50, 0), (15, 64, 1), (1, 1, 3)):  # compiled once for all
        logits = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        labels = torch.zeros(tokens + start, dtype=torch.int64)[start:]
        for differentiate in (False, True):
            triton_passes.compute_losses(logits, columns, labels, differentiate)


def compile_sparse():
    for module, names in SPARSE.items():
        for name in names:
            setattr(module, name, Compiler(getattr(module, name)))
    tiles._SHORTEST = 4  # lists have several parts
    for queries in (32, 33, 40):  # compiled once for all of them
        starts = torch.zeros(queries, 2, 4, dtype=torch.int32)
        at = torch.arange(queries)
        blocks = FarBlocks(starts, at, at, 48, queries + 2, at * 0)
        q, k = (
            torch.zeros(tokens, heads, 24, dtype=torch.bfloat16)
            for tokens, heads in ((queries, 6), (queries + 1, 2))
        )
        lse, lse_delta, dq = (torch.zeros(s) for s in ((6, queries), (queries, 6, 2), q.shape))
        grads = dq, *torch.zeros(2, *k.shape)
        triton_far.add_far_outputs(q, FarKeys(k, k, blocks, 1, 0.3), q.clone(), lse)
        triton_far.add_far_gradients(q, q, FarKeys(k, k, blocks, 1, 0.3), lse_delta, *grads)
        choosers = Choosers.of_document(torch.arange(queries), queries - 1)
        keys = CompressedKeys(*torch.zeros(2, queries - 2, 2, 24))
        triton_choice.choose_by_score(q, choosers, keys, InfLLMV2(), 0.3)


def compile_lightning():
    """Compile the kernels of both directions, for a document that begins and ends elsewhere."""
    for name in LIGHTNING:
        setattr(lightning_blocks, name, Compiler(getattr(lightning_blocks, name)))
    edge = torch.zeros(1, 3, 48, 48)
    for tokens in (1_000, 999):  # compiled once for both
        x = torch.zeros(tokens, 3, 48, dtype=torch.bfloat16)
        segments = Segments((0, tokens), (0,), (0,))
        rates = find_rates(segments, (0.0,) * 3, None, x)
        states = lightning.forward_states(x, x, rates, segments)
        lightning.outputs(x, x, x, rates, 0.3, segments, states, edge)
        states = lightning.backward_states(x, x, rates, 0.3, segments)
        lightning.gradients(x, x, x, x, rates, 0.3, segments, edge, states, edge)


def compile_copies():
    """Compile the kernels that load blocks by the copy engine."""
    triton_far._can_copy = lambda *_: True
    *of_tokens, documents = torch.zeros(4, 32, dtype=torch.int64)
    blocks = FarBlocks(*of_tokens, 32, 40, documents)
    for name in ("forward", "dq"):
        kernel = Compiler(getattr(triton_far, f"_{name}").kernel)
        starts = torch.zeros(32, 2, 4, dtype=torch.int32)
        far = FarKeys(*torch.zeros(2, 40, 2, 32), replace(blocks, starts=starts), 1, 0.3)
        q, row = torch.zeros(32, 6, 32), torch.zeros(32, 6, 2)
        others = (q.clone(), row[:, :, 0].T) if name == "forward" else (q, row, q.clone())
        triton_far._launch_by_tiles(name, kernel, (q, far.k, far.v, *others), far)


def compile_adamw():
    triton_adamw._update = Compiler(triton_adamw._update, capability=80)
    numbers = Update(1e-3, 2, 0.5, (0.9, 0.95), 1e-8, 0.1)
    state, half = torch.zeros(3, 2048), torch.zeros(2048, dtype=torch.bfloat16)
    for step in (2, 3):  # compiled once for both
        triton_adamw.update(*state, half, half, numbers._replace(step=step, lr=1e-3 * step))
    triton_adamw.update(*state, state[0], None, numbers)


if __name__ == "__main__":
    compile_adamw()
    compile_attention()
    compile_few_queries()
    compile_fused()
    compile_losses()
    compile_passes()
    compile_sparse()
    compile_decoding()
    compile_copies()
    compile_lightning()
