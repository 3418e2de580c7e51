"""Training in chunks: its losses and gradients are those of one step on the whole sequence."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bmt_burst import Chunks, InfLLMV2, Layout, Mask, SequenceParallel, burst_attn_func, simulate
from bmt_burst.calls.softmax import Request
from bmt_burst.extensions import find_kind
from bmt_burst.lightning.memory import Lightning
from bmt_burst.sequence.layout import LAYOUTS
from bmt_burst.sequence.span import overlap
from bmt_burst.sparse import plan
from bmt_burst.transport import ALONE
from models.blocks import Saving
from models.config import CPMConfig
from models.cpm import CPM
from tests.cases import random_mask
from tests.launcher import run_threads
from tests.rings import on_ranks

DENSE = CPMConfig(40, 32, 48, 3, 4, 2, 8, scale_emb=3.0, scale_depth=1.4)
SPARSE = dataclasses.replace(
    DENSE,
    sparse=InfLLMV2(
        block_size=16, kernel_size=8, kernel_stride=4, window_size=32, topk=3, dense_len=90
    ),
)
NOPE = dataclasses.replace(SPARSE, sparse=dataclasses.replace(SPARSE.sparse, use_nope=True))
SCALED = dataclasses.replace(
    DENSE,
    window=20,
    window_pattern="wf",
    qk_norm=True,
    rope_scaling={
        "kind": "longrope",
        "original_length": 64,
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
)
WINDOWED = dataclasses.replace(DENSE, window=9, window_pattern="wwf")
TARGETS, LARGEST = 97.0, 1e-12


def two_layers(config: CPMConfig) -> CPMConfig:
    return dataclasses.replace(config, num_layers=2)


def build(config: CPMConfig, sp: SequenceParallel | None = None, saving: str = "none") -> CPM:
    """Return a model whose weights depend on nothing else."""
    model = CPM(config, sp, Saving(saving)).double()
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.dim() == 1), 0.3, generator=chance)
    return model


def make_data(masks: Mask | list[Mask]) -> list[torch.Tensor]:
    """Return tokens, labels and positions of two whole rows."""
    masks = [masks] * 2 if isinstance(masks, Mask) else masks
    positions = torch.stack([mask.positions() for mask in masks])
    x, y = torch.randint(0, 40, (2, *positions.shape), generator=torch.Generator().manual_seed(5))
    return [x, y.masked_fill(x % 7 == 0, -100), positions]


def in_chunks(chunks: Chunks, model: CPM, data, evaluate: bool = False) -> float:
    """Return this rank's loss, after its backward unless `evaluate`."""
    sp, total = chunks.sp, 0.0
    x, y, positions = (chunks.layout.shard(part, sp.rank) for part in data)
    for chunk in chunks.forward(last=evaluate):
        labels = y[:, chunk.span] if evaluate else None
        found = model(x[:, chunk.span], positions[:, chunk.span], labels, cache=chunk)
        total += float(found[0]) if evaluate else 0.0
    for chunk in () if evaluate else chunks.backward():
        loss, _ = model(x[:, chunk.span], positions[:, chunk.span], y[:, chunk.span], cache=chunk)
        (loss / TARGETS).backward()
        total += float(loss.detach())
    return total


DOCUMENTS = Mask.documents((0, 61, 68, 69, 190))
CASES = [
    # config, ranks, masks, tokens of a chunk, layout, saving
    (DENSE, 4, [Mask.documents((0, 20, 64)), Mask.causal(64)], 22, "zigzag", "none"),
    (SCALED, 1, DOCUMENTS, 60, "zigzag", "selective"),
    (SCALED, 3, [Mask.causal(80), Mask.documents((0, 41, 80))], 40, "contiguous", "full"),
    (SPARSE, 2, DOCUMENTS, 40, "contiguous", "none"),
    (NOPE, 1, Mask.causal(200), 50, "zigzag", "selective"),
    (NOPE, 3, [Mask.causal(190), DOCUMENTS], 64, "zigzag", "full"),
    (
        WINDOWED,
        4,
        [Mask.documents((0, 25, 50, 99)), Mask.documents((0, 30, 99))],
        25,
        "zigzag",
        "none",
    ),
    (SPARSE, 3, [Mask.documents((0, 60, 190)), DOCUMENTS], 48, "striped", "full"),
]


@pytest.mark.parametrize("case", CASES, ids=[str(n) for n in range(len(CASES))])
def test_a_step_in_chunks_is_a_step_on_the_whole_sequence(case):
    config, size, masks, tokens, layout, saving = case
    config = config if config is WINDOWED else two_layers(config)
    data = make_data(masks)
    whole = build(config)
    loss, _ = whole(data[0], data[2], data[1], mask=masks)
    (loss / TARGETS).backward()

    def work(sp):
        model = build(config, sp, saving)
        chunks = Chunks(masks, tokens, config.num_layers, sp, layout=layout)
        evaluated = in_chunks(chunks, model, data, evaluate=True)
        return evaluated, in_chunks(chunks, model, data), [p.grad for p in model.parameters()]

    evaluated, losses, grads = zip(*on_ranks(size, work), strict=True)
    for found in (evaluated, losses):
        assert sum(found) == pytest.approx(float(loss.detach()), rel=LARGEST)
    for p, *shares in zip(whole.parameters(), *grads, strict=True):
        error = (sum(shares) - p.grad).abs().max() / p.grad.abs().max()
        assert error < LARGEST


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
def test_sparse_queries_may_be_the_last_tokens_of_their_keys(layout):
    """Or all of them, with keys that lie elsewhere."""
    q, k, v = torch.randn(3, 1, 300, 2, 8, dtype=torch.float64)
    documents = Mask.documents((0, 200, 300))
    whole = burst_attn_func(q, k, v, mask=documents, sparse=SPARSE.sparse, process_group=ALONE)
    for mask, first in ((documents.rows(170, 300), 170), (documents, 0)):
        queries = Layout.balanced(mask, 3) if layout == "balanced" else layout
        if isinstance(queries, str):
            queries = Layout.named(layout, 300 - first, 3)
        keys = Layout.chunks(300, 3, 90)

        def work(ring, mask=mask, first=first, queries=queries, keys=keys):
            mine = queries.shard(q[:, first:], ring.rank)
            options = {"mask": mask, "layout": queries, "kv_layout": keys, "process_group": ring}
            parts = (keys.shard(x, ring.rank) for x in (k, v))
            return burst_attn_func(mine, *parts, sparse=SPARSE.sparse, **options)

        out = queries.unshard(simulate(3, work))
        assert (out - whole[:, first:]).abs().max() < LARGEST


def hide_later_chunks(mask: Mask, chunks: Layout) -> Mask:
    """Return the pairs of a mask whose key is in the chunk of the query or before it."""
    return Mask(
        mask.seq_len,
        tuple(
            s._replace(q=overlap(s.q, (start, stop)), kv=overlap(s.kv, (0, stop)))
            for s in mask.slices
            for start, stop in chunks.spans
        ),
    )


def attend_in_chunks(masks, tokens, sp, layout, window, q, k, v, dout):
    """Return this rank's out, dq, dk and dv of all chunks."""
    chunks = Chunks(masks, tokens, 1, sp, layout=layout)
    mine = [chunks.layout.shard(x, sp.rank) for x in (q, k, v, dout)]
    for chunk in chunks.forward():
        chunk.attend(0, *(x[:, chunk.span] for x in mine[:3]), window)
    found = []
    for chunk in chunks.backward():
        *inputs, gradient = (x[:, chunk.span].contiguous() for x in mine)
        inputs = [x.requires_grad_() for x in inputs]
        out = chunk.attend(0, *inputs, window)
        out.backward(gradient)
        found.insert(0, (out.detach(), *(x.grad for x in inputs)))
    return [chunks.layout, *(torch.cat(x, 1) for x in zip(*found, strict=True))]


@pytest.mark.parametrize("seed", range(16))
def test_attention_in_chunks_of_any_mask_is_attention_to_the_whole_sequence(seed):
    chance = random.Random(seed)
    size, tokens = chance.choice((1, 2, 3, 8)), chance.randint(48, 70)
    most, window = chance.randint(2 * size + 2, 30), chance.choice((None, chance.randint(1, 40)))
    layout, rows = chance.choice([*LAYOUTS]), chance.choice((1, 2))
    chunks = Layout.chunks(tokens, size, most, layout)
    masks = [hide_later_chunks(random_mask(chance, tokens), chunks) for _ in range(rows)]
    inputs = torch.randn(4, rows, tokens, 2, 8, dtype=torch.float64)
    q, k, v, dout = inputs[0], *inputs[1:3, :, :, :1], inputs[3]
    results = on_ranks(
        size, lambda sp: attend_in_chunks(masks, most, sp, layout, window, q, k, v, dout)
    )
    limited = masks if window is None else [mask.windowed(window) for mask in masks]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = burst_attn_func(*leaves, mask=limited, process_group=ALONE)
    out.backward(dout)
    parts = zip(*(found[1:] for found in results), strict=True)
    for expected, found in zip((out, *(x.grad for x in leaves)), parts, strict=True):
        assert (chunks.unshard(found) - expected).abs().max() < LARGEST


def test_sparse_chunks_choose():
    """Otherwise the test above would compare dense attention."""
    data, model = make_data(Mask.causal(300)), build(SPARSE)
    chunks = Chunks(Mask.causal(300), 70, 3)
    sparse = in_chunks(chunks, model, data, evaluate=True)
    dense = dataclasses.replace(SPARSE, sparse=None)
    assert abs(in_chunks(chunks, build(dense), data, evaluate=True) - sparse) > 1e-3


def test_sparse_chunks_choose_once(monkeypatch):
    """In the forward. The last chunk is computed once."""
    chosen, choose = [], plan.choose_by_score
    monkeypatch.setattr(plan, "choose_by_score", lambda *x: chosen.append(1) or choose(*x))
    data, model = make_data(Mask.causal(300)), build(SPARSE)
    chunks = Chunks(Mask.causal(300), 70, 3)
    in_chunks(chunks, model, data)
    assert len(chosen) == 4 * 3 * 2, "four chunks, after a dense one; three layers, two rows"
    assert not chunks._results


def test_only_the_last_forward_has_logits():
    chunks, model = Chunks(Mask.causal(60), 20, 3), build(DENSE)
    x, positions = torch.zeros(1, 20, dtype=torch.int64), torch.arange(20)
    assert [model(x, positions, cache=c).shape[1] for c in chunks.forward()] == [0, 0]
    assert [model(x, positions, cache=c).shape[1] for c in chunks.forward(last=True)] == [20] * 3
    assert not chunks._memories, "an evaluation leaves no keys"


def take(model: CPM, chunk) -> torch.Tensor:
    """Compute a chunk of zeros. Return its loss, or nothing in a forward."""
    x = torch.zeros(1, chunk.span.stop - chunk.span.start, dtype=torch.int64)
    return model(x, torch.arange(*chunk.positions), x, cache=chunk)[0]


def step(chunks: Chunks, model: CPM, change=lambda model: None, backwards: int = 1) -> None:
    """Take a step. `change` may change the model between the runs."""
    for chunk in chunks.forward():
        take(model, chunk)
    change(model)
    for chunk in chunks.backward():
        loss = take(model, chunk)
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)


def scale_keys(model: CPM) -> None:
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight.mul_(1.01)


def scale_last_values(model: CPM) -> None:
    with torch.no_grad():
        model.layers[2].self_attn.v_proj.weight.mul_(1.01)


def hide_keys(model: CPM) -> CPM:
    """Make a layer's keys zeros, which have no scale."""
    model.layers[0].self_attn.k_proj.weight.data.zero_()
    return model


def run_without_gradient(chunks: Chunks, model: CPM) -> None:
    for chunk in itertools.chain(chunks.forward(), chunks.backward()):
        with torch.no_grad():
            take(model, chunk)


def use_chunk_again(chunks: Chunks, model: CPM) -> None:
    [first, *_] = (chunk for chunk in chunks.forward() if take(model, chunk) is not None)
    step(chunks, model)
    take(model, first)


def use_the_first_chunk(chunks: Chunks, model: CPM) -> None:
    run = chunks.forward()
    first = next(run)
    take(model, first)
    next(run)
    take(model, first)


def pass_tokens(chunks: Chunks, model: CPM, tokens: int, **more) -> None:
    x = torch.zeros(1, tokens, dtype=torch.int64)
    for chunk in chunks.forward():
        model(x, torch.arange(tokens), cache=chunk, **more)


def change_batch(chunks: Chunks, model: CPM) -> None:
    for chunk in chunks.forward():
        x = torch.zeros(2 - chunk.number, 20, dtype=torch.int64)
        model(x, torch.arange(*chunk.positions), cache=chunk)


def change_window(chunks: Chunks, model: CPM) -> None:
    x = torch.zeros(1, 20, 2, 8)
    for chunk in chunks.forward():
        for layer in range(3):
            chunk.attend(layer, x, x, x, 9 + chunk.number)


def attend(layers=(0, 1, 2), change=lambda *inputs: inputs, sparse=None):
    """Return a use of Chunks that calls layers. `change` and `sparse` are for the second chunk."""

    def do(chunks: Chunks, model: CPM) -> None:
        for chunk in chunks.forward():
            inputs, options = torch.ones(3, 1, 20, 2, 8), {}
            if chunk.number == 1:
                inputs, options = change(*inputs), {"sparse": sparse}
            for layer in layers:
                chunk.attend(layer, *inputs, **options)

    return do


def attend_backward(layers, used):
    """Return a use of Chunks that calls layers in the backward. The loss uses some of the calls."""

    def do(chunks: Chunks, model: CPM) -> None:
        attend()(chunks, model)
        for chunk in chunks.backward():
            inputs = [torch.ones(1, 20, 2, 8, requires_grad=True) for _ in range(3)]
            outs = [chunk.attend(layer, *inputs) for layer in layers]
            sum(outs[n] for n in used).sum().backward()

    return do


def take_twice(chunks: Chunks, model: CPM) -> None:
    """Run the model on a chunk again, without gradient."""
    for chunk in chunks.forward():
        take(model, chunk)
    for chunk in chunks.backward():
        loss = take(model, chunk)
        with torch.no_grad():
            take(model, chunk)
        loss.backward()


def differentiate_in_forward(chunks: Chunks, model: CPM) -> None:
    for chunk in chunks.forward(last=True):
        with torch.enable_grad():
            take(model, chunk).backward()


def use_an_earlier_loss(chunks: Chunks, model: CPM) -> None:
    losses = []
    for _ in range(2):
        for chunk in chunks.forward():
            take(model, chunk)
        for chunk in chunks.backward():
            losses.append(take(model, chunk))
            if len(losses) == 2:
                losses[0].backward()
            break


WRONG = {
    "a loss of an earlier run": (
        use_an_earlier_loss,
        "a backward in the loop that yielded chunk 2, got one after this loop",
    ),
    "a layer that there is not": (attend((0, 3)), "expected a layer below 3 in these Chunks, got"),
    "a module for a layer": (attend((DENSE,)), "layer must be a whole number, got CPMConfig"),
    "a layer twice": (attend((0, 1, 2, 1)), "computed 2 times by layer 1: run the model once"),
    "another dtype": (
        attend(change=lambda *inputs: [x.double() for x in inputs]),
        r"float32 on cpu, as in earlier calls of layer 0, got \(1, 2, 8\), torch.float64",
    ),
    "values of another size": (
        attend(change=lambda q, k, v: (q, k, v[..., :4])),
        "values of the keys' head size, 8, got 4",
    ),
    "another choice": (
        attend(sparse=InfLLMV2(dense_len=-1)),
        "expected extension=None, as in earlier calls of layer 0, got extension=InfLLMV2",
    ),
    "no backward of a layer": (
        attend_backward((0, 1, 2), (0, 2)),
        "of chunk 2 .* got none of layer 1",
    ),
    "a second run": (take_twice, "chunk 2 was computed 2 times by layer 0"),
    "another window": (
        change_window,
        "expected window=9, as in earlier calls of layer 0, got window=10",
    ),
    "another batch": (change_batch, r"expected k of \(2, 2, 8\).* got \(1, 2, 8\)"),
    "no forward": (lambda chunks, model: next(chunks.backward()), "whose forward.. has ended"),
    "no model": (lambda chunks, model: [*chunks.forward()], "not computed by 3 of 3 layers"),
    "no backward": (lambda chunks, model: step(chunks, model, backwards=0), "got none of layer 0"),
    "a backward in forward()": (differentiate_in_forward, "a chunk of forward.. or of a pre"),
    "two backwards": (lambda chunks, model: step(chunks, model, backwards=2), "ran twice"),
    "other keys": (lambda chunks, model: step(chunks, model, scale_keys), "chunk 1 differ"),
    "other values": (
        lambda chunks, model: step(chunks, model, scale_last_values),
        "chunk 1 differ",
    ),
    "other keys beside zeros": (
        lambda chunks, model: step(chunks, hide_keys(model), scale_keys),
        "chunk 1 differ",
    ),
    "no gradient": (run_without_gradient, "got a run without gradient: leave out torch.no_grad"),
    "an old chunk": (
        use_chunk_again,
        r"expected no chunk after the loop over forward\(\) or backward\(\), got chunk 0",
    ),
    "a chunk before the present one": (
        use_the_first_chunk,
        "expected chunk 1, which the loop yielded last, got chunk 0",
    ),
    "a mask": (
        lambda chunks, model: pass_tokens(chunks, model, 20, mask=Mask.causal(20)),
        "expected a Chunk or a mask and layout, got both",
    ),
    "other tokens": (
        attend(change=lambda *inputs: [x[:, 1:] for x in inputs]),
        r"expected q \(batch, 20, heads",
    ),
    "other positions": (
        lambda chunks, model: pass_tokens(chunks, model, 19),
        r"expected positions \(batch, 20\) or \(20,\), of this rank's tokens of chunk 0, got shape",
    ),
    "tokens of a shorter sequence": (
        lambda chunks, model: next(chunks.forward()).shard(torch.zeros(1, 59)),
        r"expected 60 tokens of the whole sequence in dimension 1, got 59 in shape \(1, 59\)",
    ),
    "positions that are no tensor": (
        lambda chunks, model: next(chunks.forward()).check_positions([0] * 20),
        "positions must be a torch.Tensor, got list",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_refused(case):
    do, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        do(Chunks(Mask.causal(60), 20, 3), build(DENSE))


def test_weights_that_changed_a_little_are_noticed_in_16_bits():
    """Keys are 4 % larger, so no entry differs by more than rounding may do to a single one."""

    def scale(model: CPM) -> None:
        model.layers[1].self_attn.k_proj.weight.data.mul_(1.04)

    chunks = Chunks(Mask.causal(60), 20, 3)
    step(chunks, build(DENSE).bfloat16())
    with pytest.raises(ValueError, match=r"chunk 1 differ .* by 2.5. times as much"):
        step(chunks, build(DENSE).bfloat16(), scale)


def test_what_follows_the_last_attention_may_be_trained_alone():
    models = whole, cut = [build(DENSE).requires_grad_(False) for _ in range(2)]
    for model in models:
        model.norm.weight.requires_grad_()
    x = torch.zeros(1, 60, dtype=torch.int64)
    whole(x, torch.arange(60), x)[0].backward()
    step(Chunks(Mask.causal(60), 20, 3), cut)
    expected, found = (model.norm.weight.grad for model in models)
    assert (found - expected).abs().max() / expected.abs().max() < LARGEST


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (3, 2)}, "ranks differ in layers of Chunks: rank 0 has 3, rank 1 has 2"),
        ({"length": (70, 66)}, "ranks differ in length of Chunks: rank 0 has 70, rank 1 has 66"),
    ],
)
def test_ranks_that_make_different_chunks_are_refused(arguments, message):
    def work(sp):
        mine = {name: values[sp.rank] for name, values in arguments.items()}
        chunks = Chunks(Mask.causal(60), 20, sp=sp, **{"layers": 3} | mine)
        with pytest.raises(ValueError, match=message):
            for chunk in chunks.forward():
                chunk.attend(0, *torch.ones(3, 1, 10, 2, 8))

    on_ranks(2, work)


def test_layers_in_another_order_are_refused():
    """Also of lightning attention, whose ranks would add up states of different layers."""
    kinds = find_kind(None, {})[0], Lightning((0.1, 0.2))

    def work(sp):
        x = torch.ones(1, 10, 2, 8)
        for kind in kinds:
            chunks = Chunks(Mask.causal(60), 20, 2, sp).forward()
            chunk = next(chunks)
            for layer in (1, 0) if sp.rank else (0, 1):
                chunk.mix(layer, kind, x, x, x)
            differ = r"in order of layers: rank 0 has \[0, 1\], rank 1 has \[1, 0\]"
            with pytest.raises(ValueError, match=differ):
                next(chunks)

    on_ranks(2, work)


def test_a_chunk_without_a_backward_on_one_rank_is_refused_on_all():
    def work(sp):
        chunks, x = Chunks(Mask.causal(20), 20, 1, sp), torch.ones(1, 10, 2, 8)
        list(chunks.forward())
        with pytest.raises(ValueError, match="got a run without gradient: leave out"):
            for chunk in chunks.backward():
                with torch.set_grad_enabled(sp.rank == 0):
                    chunk.mix(0, Lightning((0.1, 0.2)), x, x, x)

    on_ranks(2, work)


def test_a_run_that_another_one_replaced_on_one_rank_is_refused_on_all():
    def work(sp):
        chunks, x = Chunks(Mask.causal(40), 20, 1, sp), torch.ones(1, 10, 2, 8)
        run = chunks.forward()
        next(run).mix(0, Lightning((0.1, 0.2)), x, x, x)
        if sp.rank:
            next(chunks.forward())
        with pytest.raises(ValueError, match="run one at a time"):
            next(run)

    on_ranks(2, work)


def test_a_layer_twice_is_refused_on_all_ranks():
    """Before its second backward, so the group stays usable."""

    def work(sp):
        chunks = Chunks(Mask.causal(20 * sp.size), 20 * sp.size, 3, sp)
        do = attend_backward((0, 1, 2, 1), range(4))
        for _ in range(2):
            with pytest.raises(ValueError, match="one backward of chunk 0 in layer 1, got two"):
                do(chunks, None)

    on_ranks(2, work)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_no_second_run(reentrant):
    """Also a nested one."""
    x = torch.randn(1, 40, 8, dtype=torch.float64)
    w = torch.randn(3, 8, 8, dtype=torch.float64, requires_grad=True)

    def run(x, chunk, layer):
        q, k, v = ((x @ one).unflatten(2, (2, 4)) for one in w)
        return chunk.attend(layer, q, k, v).flatten(2)

    def nested(x, chunk):
        x = checkpoint(run, x, chunk, 0, use_reentrant=reentrant)
        return checkpoint(run, x, chunk, 1, use_reentrant=reentrant)

    def compute(step, backwards=1):
        chunks = Chunks(Mask.causal(40), 15, 2)
        for chunk in chunks.forward():
            step(x[:, chunk.span], chunk)
        for chunk in chunks.backward():
            loss = step(x[:, chunk.span].requires_grad_(), chunk).square().sum()
            for _ in range(backwards):
                loss.backward(retain_graph=backwards > 1)
        grad, w.grad = w.grad, None
        return grad

    def outer(x, chunk):
        return checkpoint(nested, x, chunk, use_reentrant=reentrant)

    expected = compute(lambda x, chunk: run(run(x, chunk, 0), chunk, 1))
    assert (compute(outer) - expected).abs().max() / expected.abs().max() < LARGEST
    with pytest.raises(ValueError, match=r"ran twice|got two"):
        compute(outer, backwards=2)


def test_a_step_after_a_failed_one_is_whole():
    chunks, model, fresh = Chunks(Mask.causal(60), 20, 3), build(DENSE), build(DENSE)
    for chunk in chunks.forward():
        take(model, chunk)
        break
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="that are without kept keys"):
        next(chunks.backward())
    old = chunks.forward()
    next(old)
    step(chunks, model)
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="run one at a time"):
        next(old)
    old = chunks.forward()  # a traceback may hold it
    next(old)
    chunks.forget()
    assert torch.is_grad_enabled()
    step(Chunks(Mask.causal(60), 20, 3), fresh)
    for p, same in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p.grad, same.grad)


def test_a_loop_that_another_thread_collects_leaves_that_threads_grad_mode():
    loops = [Chunks(Mask.causal(60), 20, 3).forward()]
    with torch.enable_grad():
        next(loops[0])

    def collect() -> bool:
        with torch.no_grad():
            loops.clear()
            return torch.is_grad_enabled()

    assert run_threads(collect) == [False]


def test_ranks_connect_in_the_first_chunk(monkeypatch):
    """NCCL may find no memory for it in a backward."""
    sums, add = [], SequenceParallel.sum
    monkeypatch.setattr(SequenceParallel, "sum", lambda sp, x: sums.append(sp.rank) or add(sp, x))
    x, _, positions = make_data(Mask.causal(60))

    def work(sp):
        chunks, model = Chunks(Mask.causal(60), 20, 3, sp), build(DENSE, sp)
        for chunk in chunks.forward():
            model(chunk.shard(x), chunk.shard(positions), cache=chunk)
            assert sums.count(sp.rank) == (chunk.number > 0)

    on_ranks(2, work)
    assert sorted(sums) == [0, 1]


def test_layers_below_the_first_trainable_weight_need_no_backward():
    model, whole = build(DENSE), build(DENSE)
    for one in (model, whole):
        one.embed_tokens.requires_grad_(False)
        one.layers[0].requires_grad_(False)
    step(Chunks(Mask.causal(60), 20, 3), model)
    step(Chunks(Mask.causal(60), 60, 3), whole)
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None)
        assert p.grad is None or (p.grad - expected.grad).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("trained", "sparse"), [(0, None), (1, None), (2, None), (2, SPARSE.sparse)]
)
def test_memory_for_all_chunks_and_backwards_is_reserved_in_the_first_one(trained, sparse):
    """Also for the backward of v alone, as with an adapter: kept keys record nothing. The last
    chunk sees few keys, and some before it see so many that they send queries.
    """
    mask = Mask.documents((0, 896, 1024))

    def work(ring):
        def attend(chunk):
            out = chunk.attend(0, *(x[:, chunk.span] for x in inputs), sparse=sparse)
            reserved.append(ring.reserved)
            return out

        sp = SequenceParallel(ring.rank, 2, process_group=ring)
        chunks, reserved = Chunks(mask, 128, 1, sp), []
        inputs = [torch.ones(1, 512, heads, 64) for heads in (2, 1, 1)]
        for chunk in chunks.forward(last=True):
            attend(chunk)
        assert reserved == reserved[:1] * 8, "an evaluation has no backward"
        before = reserved.pop()
        inputs[trained].requires_grad_()
        for chunk in chunks.forward():
            attend(chunk)
        for chunk in chunks.backward():
            attend(chunk).sum().backward()
        assert reserved[7:] == reserved[7:8] * 15
        assert inputs[trained].grad is not None
        return sum(before.values()) < sum(reserved[-1].values())

    assert simulate(2, work) == [True, True]


KEPT = {
    # masks, window, what the chunks before the last keep of 20 tokens, the places of a layer's keys
    "causal": (Mask.causal(60), None, (20, 20), 60),
    "window": (Mask.causal(60), 8, (7, 7), 7 + 7 + 20),
    "ending at borders": (Mask.documents((0, 10, 20, 40, 60)), None, (0, 0), 20),
    "crossing borders": (Mask.documents((0, 15, 25, 60)), None, (5, 15), 5 + 15 + 20),
    "crossing one": (Mask.documents((0, 5, 40, 60)), None, (15, 0), 15 + 20),
    "rows": ([Mask.documents((0, 20, 60)), Mask.documents((0, 15, 25, 60))], None, (5, 20), 45),
}


@pytest.mark.parametrize("case", KEPT)
def test_only_what_later_chunks_see_is_kept(case):
    masks, window, kept, places = KEPT[case]
    config = dataclasses.replace(DENSE, window=window)
    chunks, model, (x, _, positions) = Chunks(masks, 20, 3), build(config), make_data(masks)
    for chunk in chunks.forward():
        model(x[:, chunk.span], positions[:, chunk.span], cache=chunk)
    found = [keys.kept.stop - keys.kept.start for keys in chunks._memories[0].keys]
    assert found == [*kept, 0]
    run = chunks.backward()
    last = next(run)
    model(x[:, last.span], positions[:, last.span], cache=last)
    memory = [x for layer in chunks._memories.values() for x in (*layer.kept, *layer.sums)]
    entries = 2 * places * config.num_kv_heads * config.head_dim  # of two rows
    assert sum(x.nbytes for x in memory) == 3 * 2 * entries * (8 + 8)  # three layers in float64


def test_chunks_of_a_window_share_plans(monkeypatch):
    made, make = [], Request.make_plan
    monkeypatch.setattr(Request, "make_plan", lambda *given: made.append(1) or make(*given))
    config, mask = dataclasses.replace(DENSE, window=9), Mask.causal(160)

    def work(sp):
        in_chunks(Chunks(mask, 20, 3, sp), build(config, sp), make_data(mask))

    on_ranks(2, work)
    # on each rank to reserve memory, of the first chunk and of the seven others
    assert len(made) == 2 * 2


@pytest.mark.parametrize(
    ("config", "tokens", "size"), [(DENSE, 400, 40), (SPARSE, 300, 5)], ids=["dense", "sparse"]
)
def test_no_plan_is_made_after_the_first_chunk(config, tokens, size, monkeypatch):
    """Also of more chunks than plans are kept otherwise, and where a second run takes choices."""
    made, make = [], Request.make_plan
    monkeypatch.setattr(Request, "make_plan", lambda *given: made.append(1) or make(*given))
    mask, config = Mask.causal(tokens), dataclasses.replace(config, num_layers=1)

    def work(sp):
        in_chunks(Chunks(mask, tokens // size, 1, sp), build(config, sp), make_data(mask))

    on_ranks(2, work)
    assert len(made) == 2 * size


def test_a_loss_that_is_held_does_not_hold_kept_keys():
    chunks, model, kept = Chunks(Mask.causal(60), 20, 3), build(DENSE), []
    for chunk in chunks.forward():
        take(model, chunk)
    for chunk in chunks.backward():
        loss = take(model, chunk)
        loss.backward()
        layer = chunks._memories[0]
        kept = [StorageWeakRef(x.untyped_storage()) for x in (*layer.kept, *layer.sums)]
        del layer
    assert loss.grad_fn is not None
    assert kept and all(storage.expired() for storage in kept)


def test_a_step_that_fails_frees_kept_keys():
    chunks, model, kept = Chunks(Mask.causal(60), 20, 3), build(DENSE), []

    def fail() -> None:
        for chunk in chunks.forward():
            take(model, chunk)
            kept.append(StorageWeakRef(chunks._memories[0].kept[0].untyped_storage()))
            if chunk.number == 1:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert kept and all(storage.expired() for storage in kept)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Mask.full(60), 20, 3), ValueError, "no token sees a later chunk"),
        (([Mask.causal(60), Mask.causal(61)], 20, 3), ValueError, "masks of one length"),
        (([], 20, 3), ValueError, "got no mask"),
        ((Mask.causal(20, kv_len=60), 20, 3), ValueError, r"of one length.* got \[20, 60\]"),
        ((Mask.causal(60), 20, 0), ValueError, "layers must be at least 1"),
        ((Mask.causal(60), 0, 3), ValueError, "tokens=0"),
        (
            (SequenceParallel().sequence(Mask.causal(60)), 20, 3),
            TypeError,
            "got WholeSequence: pass sequence.mask, since chunks have their own layouts",
        ),
        ((5, 20, 3), TypeError, "expected a Mask or one for each row, got int"),
        (
            ([Mask.causal(60), None], 20, 3),
            TypeError,
            "expected a Mask or one for each row, got NoneType",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Chunks(*arguments)


def test_lengths_that_do_not_fit_positions_are_refused():
    """Rotary scalings depend on the length, which no rank sees before the last chunk."""
    model, mask = build(SCALED), Mask.documents((0, 30, 60))
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        Chunks(mask, 20, 3, length=0)
    with pytest.raises(ValueError, match=r"of \(30,\), that of .*, got 60: pass the right len"):
        step(Chunks(mask, 20, 3), model)
    step(Chunks(mask, 20, 3, length=60), model)


@pytest.mark.parametrize("mask", [Mask.causal(1024), Mask.documents((0, 300, 1024), window=50)])
@pytest.mark.parametrize("layout", [Layout.zigzag(1024, 2), Layout.contiguous(1024, 2)])
def test_shards_of_another_layout_are_refused_by_their_positions(mask, layout):
    """Ranks have as many tokens of each chunk as in the chunks' layout."""
    x, y, positions = (part[:1] for part in make_data(mask))

    def work(sp):
        chunks, model = Chunks(mask, 256, 3, sp), build(DENSE, sp)
        other = (layout.shard(part, sp.rank) for part in (x, y, positions))
        chunks.layout.shard = lambda _x, _rank: next(other)  # of `in_chunks`
        with pytest.raises(ValueError, match=r"that do not fall .* chunks.layout.shard\(x"):
            in_chunks(chunks, model, (x, y, positions), evaluate=True)

    on_ranks(2, work)


def test_positions_may_begin_elsewhere_repeat_and_leave_some_out():
    mask = Mask(66, Mask.documents((0, 20, 60)).slices)
    positions = 7 + 3 * torch.arange(66)
    positions[20:40] -= 60  # a document
    positions[40:60] = torch.arange(20) // 2  # a document that the mask does not know
    positions[60:] = 1  # padding
    data = [torch.zeros(1, 66, dtype=torch.int64)] * 2 + [positions.unsqueeze(0)]

    def work(sp):
        in_chunks(Chunks(mask, 30, 3, sp), build(DENSE, sp), data, evaluate=True)

    on_ranks(2, work)


def test_chunks_of_other_ranks_than_the_model_are_refused():
    def work(sp):
        with pytest.raises(ValueError, match="this model's 2 ranks, got one of 1: make it"):
            step(Chunks(Mask.causal(60), 30, 3), build(DENSE, sp))

    on_ranks(2, work)


def test_an_error_on_one_rank_is_raised_on_all():
    def work(sp):
        chunks = Chunks(Mask.causal(60), 30, 3, sp)
        try:
            pass_tokens(chunks, build(DENSE, sp), 15 - (sp.rank == 1))
        except ValueError as error:
            return str(error)
        return "no error"

    assert all("expected positions (batch, 15)" in text for text in on_ranks(2, work))


def test_wrappers_of_models_do_not_rebuild_a_chunk():
    """FSDP2 with mixed precision casts the tensors of all arguments."""
    x = torch.zeros(1, 10, 2, 8)
    for chunk in Chunks(Mask.causal(20), 10, 1).forward():
        cast = _apply_to_tensors(lambda x: x, {"cache": chunk})
        assert cast["cache"].attend(0, x, x, x).shape == x.shape
