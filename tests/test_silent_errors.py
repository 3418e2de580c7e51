"""The tests that docs/silent-errors.md shows: each passes here, and fails with its fault put in."""

import ast
import dataclasses
import functools
import re

import pytest
import torch
from torch.nn import functional

from bmt_burst import Layout, Mask, SequenceParallel, Slice
from bmt_burst.parts.chunks import Chunk
from bmt_burst.sparse.queries import Choosers
from examples import own_stack
from tests.launcher import ROOT

PAGE = ROOT / "docs/silent-errors.md"
CODE = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
TESTS = re.findall(r"^def (test_\w+)", CODE, re.MULTILINE)
ENTRIES = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[2:-1]


def page() -> dict:
    """The names that the page's code defines."""
    names: dict = {}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return names


FAULTS = []


def fault_of(test: str, name: str = ""):
    """Register a fault that a test of the page must find.

    It puts `fault(original, names)` in the place of a name of examples/own_stack.py, or patches the
    library.
    """

    def register(fault):
        def put_in(monkeypatch):
            names = vars(own_stack)
            if name:
                monkeypatch.setitem(names, name, fault(names[name], names))
            else:
                fault(names, monkeypatch)

        FAULTS.append(pytest.param(test, put_in, id=fault.__name__))
        return fault

    return register


@fault_of("test_documents_do_not_see_each_other")
def documents_are_one_sequence(_names, monkeypatch):
    documents = Mask.documents
    monkeypatch.setattr(
        Mask, "documents", staticmethod(lambda ends, **options: documents((0, ends[-1]), **options))
    )


@fault_of("test_the_future_is_hidden", "burst_attn_func")
def kernels_take_shards_for_contiguous(call, _names):
    return lambda *qkv, layout, **options: call(
        *qkv, layout=Layout.contiguous(layout.seq_len, layout.size), **options
    )


@fault_of("test_windows_and_sinks_are_applied", "burst_attn_func")
def windows_are_dropped(call, _names):
    return lambda *qkv, mask, **options: call(*qkv, mask=Mask.causal(mask.seq_len), **options)


@fault_of("test_windows_and_sinks_are_applied", "burst_attn_func")
def sinks_are_dropped(call, _names):
    return lambda *qkv, sinks, **options: call(*qkv, **options)


@fault_of("test_large_scores_do_not_overflow")
def merging_overflows(_names, monkeypatch):
    def naive(a, b):
        return torch.where(a == -torch.inf, b, a + torch.log(1 + torch.exp(b - a)))

    monkeypatch.setattr(torch, "logaddexp", naive)


@fault_of("test_padding_is_zero_and_has_finite_gradients", "burst_attn_func")
def padding_sees_all(call, _names):
    def with_all(mask):
        end, size = max(s.q[1] for s in mask.slices), mask.seq_len
        return Mask(size, (*mask.slices, Slice((end, size), (0, size))))

    return lambda *qkv, mask, **options: call(*qkv, mask=with_all(mask), **options)


@fault_of("test_keys_and_values_have_the_gradients_of_all_ranks", "attend")
def gathered_tensors_are_constants(_call, names):
    def attend(q, k, v, borders):
        layout, parts = Layout.zigzag(q.shape[1], 3), []
        for rank in range(3):
            own = torch.zeros(q.shape[1], 1, 1, dtype=torch.bool)
            own[layout.positions(rank)] = True
            mine = [torch.where(own, x, x.detach()) for x in (k, v)]
            parts.append(layout.shard(names["dense"](q, *mine, names["visible"](borders)), rank))
        return layout.unshard(parts)

    return attend


@fault_of("test_a_loss_of_gathered_tokens_has_its_gradient")
def gathered_tensors_have_own_gradients_only(_names, monkeypatch):
    def naive(sp, mine, seq_len):
        whole, own = unshard(sp, mine, seq_len).detach().clone(), sp.positions(seq_len)
        whole[:, own] = mine
        return whole

    unshard = SequenceParallel.unshard
    monkeypatch.setattr(SequenceParallel, "unshard", naive)


@fault_of("test_a_loss_of_gathered_tokens_has_its_gradient")
def shards_are_joined_in_the_order_of_ranks(_names, monkeypatch):
    unshard = SequenceParallel.unshard
    monkeypatch.setattr(
        SequenceParallel, "unshard", lambda sp, *x: unshard(sp.with_layout("contiguous"), *x)
    )


@fault_of("test_a_loss_of_the_logsumexp_has_its_gradient", "burst_attn_func")
def lse_is_a_constant(call, _names):
    def detached(*qkv, **options):
        out, lse = call(*qkv, **options)
        return out, lse.detach()

    return detached


@fault_of("test_a_packed_document_is_as_it_is_alone")
def compressed_keys_cross_borders(_names, monkeypatch):
    strides = Choosers.strides

    def naive(choosers, stride):
        moved = [x._replace(span=(max(x.span[0] - 1, 0), x.span[1])) for x in choosers.documents]
        return strides(dataclasses.replace(choosers, documents=tuple(moved)), stride)

    monkeypatch.setattr(Choosers, "strides", naive)


@fault_of("test_a_packed_document_is_as_it_is_alone", "burst_attn_func")
def state_ends_with_a_shard(call, _names):
    def alone(q, k, v, *, mask, layout, process_group, sparse, return_lse, **_sinks):
        own = set(layout.positions(process_group.rank).tolist())
        ends = [sum(at in own for at in range(s.q[1])) for s in mask.slices]
        options = {"sparse": sparse, "return_lse": return_lse}
        return call(q, k, v, mask=Mask.documents((0, *ends)), **options)

    return alone


@fault_of("test_ranks_share_one_sequence", "rank_inputs")
def ranks_have_parts_of_other_rows(call, _names):
    def inputs(tokens, borders):
        rows = [call(tokens.roll(rank, 1), borders) for rank in range(3)]
        return [row[rank] for rank, row in enumerate(rows)]

    return inputs


@fault_of("test_chunks_have_their_own_layout")
def chunks_are_cut_as_the_sequence_is(_names, monkeypatch):
    def shard(chunk, x):
        sp = chunk.chunks.sp
        return Layout.zigzag(x.shape[1], sp.size).shard(x, sp.rank)[:, chunk.span]

    monkeypatch.setattr(Chunk, "shard", shard)


@fault_of("test_positions_count_from_the_start_of_the_document", "rank_inputs")
def positions_restart_in_shards(call, _names):
    return lambda *arguments: [
        (tokens, torch.arange(tokens.shape[1]).unsqueeze(0), labels)
        for tokens, _, labels in call(*arguments)
    ]


@fault_of("test_positions_count_from_the_start_of_the_document")
def positions_run_through_documents(_names, monkeypatch):
    monkeypatch.setattr(Mask, "positions", lambda mask: torch.arange(mask.seq_len))


@fault_of("test_rotations_depend_on_the_whole_length")
def ranks_know_their_own_length(_names, monkeypatch):
    monkeypatch.setattr(SequenceParallel, "longest", lambda sp, positions: positions.amax(-1) + 1)


@fault_of("test_labels_are_the_next_tokens_of_the_document", "rank_inputs")
def labels_are_shifted_in_shards(call, names):
    return lambda *arguments: [
        (tokens, positions, names["shift_labels"](tokens))
        for tokens, positions, _ in call(*arguments)
    ]


@fault_of("test_labels_are_the_next_tokens_of_the_document", "shift_labels")
def labels_are_of_the_next_document(call, _names):
    return lambda tokens, mask: call(tokens)


@fault_of("test_every_length_has_the_gradients_of_one_rank", "train_step")
def padding_is_counted(call, _names):
    def pad(model, tokens, borders, ranks=3):
        more = -tokens.shape[1] % (2 * ranks) if ranks > 1 else 0
        tokens = functional.pad(tokens, (0, more))
        return call(model, tokens, (0, tokens.shape[1]), ranks)

    return pad


@fault_of("test_a_model_without_knowledge_has_the_loss_ln_64", "train_step")
def losses_are_added_over_ranks(call, _names):
    def step(model, tokens, borders, ranks=3):
        loss, grads = call(model, tokens, borders, ranks)
        return loss * ranks, grads

    return step


@fault_of("test_every_target_counts_once", "simulate")
def losses_are_means_of_ranks_with_targets(call, _names):
    return lambda size, work: [
        (loss / targets, 1) for loss, targets in call(size, work) if targets > 0
    ]


@fault_of("test_gradients_are_those_of_one_rank", "train_step")
def gradients_are_averaged(call, _names):
    def step(model, tokens, borders, ranks=3):
        loss, grads = call(model, tokens, borders, ranks)
        return loss, [grad / ranks for grad in grads]

    return step


@fault_of("test_the_norm_of_shards_is_the_norm_of_the_whole", "square_sum")
def norms_are_added(call, _names):
    return lambda tensors: call(tensors) ** 0.5


@pytest.mark.parametrize("test", TESTS)
def test_the_library_passes(test):
    page()[test]()


@pytest.mark.parametrize(("test", "fault"), FAULTS)
def test_a_fault_is_found(test, fault, monkeypatch):
    """By an assertion of the page's test, not by an error of the library."""
    fault(monkeypatch)
    names = page()
    with pytest.raises(AssertionError) as raised:
        names[test]()
    assert raised.traceback[-1].name == test


def test_every_entry_has_a_short_test_a_fault_and_a_test_that_exists():
    assert {fault.values[0] for fault in FAULTS} == set(TESTS)
    for entry, test in zip(ENTRIES, TESTS, strict=True):
        body = re.search(rf"def {test}\(\):\n(.*?)```", entry, re.DOTALL)[1]
        assert len(body.splitlines()) <= 10, test
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", entry.split("**Forbidden here by**")[1])
        assert named, test
        for path, name in named:
            assert name in functions(path), (path, name)


def test_its_table_names_every_entry():
    linked = re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", PAGE.read_text(), re.MULTILINE)
    headings = [entry.splitlines()[0] for entry in ENTRIES]
    assert linked == [(heading, heading.lower().replace(" ", "-")) for heading in headings]


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
