"""Attention with extensions, and plain attention in parts, against its definition in float64.

An entry of CASES has an extension and its definition for whole sequences on one process. To test
your own, add one. Attention that is no softmax overrides the methods that call the library, too.
tests/conformance/test_strategies.py has plain attention to whole sequences.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bmt_burst import (
    Cache,
    Chunks,
    InfLLMV2,
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    Slice,
    burst_attn_func,
    lightning_attn_func,
    simulate,
    strategies,
)
from bmt_burst.bias import areas
from bmt_burst.bias.extension import Bias
from bmt_burst.blocks.extension import BlockChoice
from bmt_burst.extensions import read_extension, write_extension
from bmt_burst.lightning.memory import Lightning
from bmt_burst.lightning.rates import Slopes
from bmt_burst.nn import BurstAttention
from bmt_burst.scores import BY_DISTANCE
from bmt_burst.sparse import choose
from bmt_burst.strategies.extension import Extension
from examples.moba import MoBA
from tests.cases import made_layout, random_qkv
from tests.lightning import SLOPES, random_log_decay, recurrence
from tests.rings import ring_arguments
from tests.temperatures import Warm

HEADS, SIZE, SCALE = 4, 8, 8**-0.5
CLOSE = 1e-10  # sums of some hundred products of numbers near 1, in float64
TABLE = torch.randn(11, HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
RATES = torch.tensor(SLOPES)
LOG_DECAY = random_log_decay(2, 61, HEADS, torch.Generator().manual_seed(1))
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
DIMS = {"lse": 2, "dlse": 2} | dict.fromkeys(("q", "k", "v", "log_decay", "out", "dout"), 1)
"""The dims of tokens, for tensors that ranks have shards of. Their rows are those of the batch."""
ROWS = DIMS.keys()


class Case:
    """Softmax attention with an extension, and its definition.

    Tensors are those of one call by name: q (B, T, H, D), k and v (B, T, G, D), those of `learned`,
    and perhaps sinks (H,).

    extension  what messages call by its name, and what has parts of attention that is no softmax;
               None for plain attention
    window     tokens that a query attends to, or None
    tokens     of a sequence in which all that the extension does occurs
    edge       tokens of a document from which on its computation changes
    kv_heads   G
    learned    tensors besides q, k and v that have gradients. Those in DIMS have two rows.
    refused    options that exclude it, with what the error says
    has_parts  whether there are chunks, prompts and new tokens of it
    holds_nan  whether its kernel on CPUs keeps NaN in a document
    is_softmax whether there are lse, sinks, strategies, padded masks and striped layouts of it
    """

    extension: Extension | Lightning | None
    tokens: int
    edge: int
    window: int | None = None
    kv_heads: int = 2
    learned: ClassVar[dict[str, Tensor]] = {}
    refused: ClassVar[Sequence[tuple[dict[str, Any], str]]] = ()
    has_parts: bool = False
    holds_nan: bool = True
    is_softmax: ClassVar[bool] = True

    def options(self, masks: Mask | list[Mask], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the options of burst_attn_func for a mask, or for one of each row."""
        return {"mask": masks, "sparse": self.extension}

    def scores(self, q: Tensor, k: Tensor, mask: Mask, tensors: dict[str, Tensor]) -> Tensor:
        """Return the scores (H, T, T) of a row's q and k (T, H, D). Those of hidden pairs are -inf.

        With fewer kv heads, k has those of each query head.
        """
        raise NotImplementedError

    def define(self, mask: Mask, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return out and lse of one row, from the definition."""
        wide = {x: tensors[x].repeat_interleave(HEADS // self.kv_heads, 2) for x in "kv"}
        scores = self.scores(tensors["q"][0], wide["k"][0], mask, tensors)
        hidden = scores == -torch.inf
        blind = hidden.all(-1)
        scores = scores.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf)
        if "sinks" in tensors:
            lse = torch.logaddexp(lse, tensors["sinks"].unsqueeze(1))
        total = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
        probs = (scores - total).exp().masked_fill(hidden, 0.0)
        out = torch.einsum("hij,jhd->ihd", probs, wide["v"][0])
        return {"out": out.unsqueeze(0), "lse": lse.unsqueeze(0)}

    def call(
        self, masks: Mask | list[Mask], tensors: dict[str, Tensor], **options: Any
    ) -> dict[str, Tensor]:
        """Return the results of `define` for this rank's tokens, from the library."""
        given = self.options(masks, tensors) | {"sinks": tensors.get("sinks")} | options
        out, lse = burst_attn_func(*(tensors[x] for x in "qkv"), SCALE, return_lse=True, **given)
        return {"out": out, "lse": lse}

    def call_part(self, part: Any, mask: Mask, tensors: dict[str, Tensor]) -> Tensor:
        """Return the attention of a chunk, of a prompt or of new tokens of a Cache."""
        options = self.options(mask, tensors) | {"sinks": tensors.get("sinks")}
        del options["mask"]
        found: Tensor = part.attend(0, *(tensors[x] for x in "qkv"), self.window, **options)
        return found


def multiply(q: Tensor, k: Tensor) -> Tensor:
    return SCALE * torch.einsum("ihd,jhd->hij", q, k)


@dataclass(frozen=True, eq=False)
class Plain(Case):
    """Softmax attention without an extension. It is called for parts only."""

    window: int | None = None
    softcap: float | None = None
    tokens: int = 90  # beyond a block of 64 new tokens, which one rank keeps
    edge: int = 9
    has_parts: bool = True
    holds_nan: bool = False  # tests/test_equality.py has its kernels
    extension: ClassVar = None

    def options(self, masks, tensors):
        return {"mask": masks, "softcap": self.softcap}

    def scores(self, q, k, mask, tensors):
        scores = multiply(q, k)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        seen = mask if self.window is None else mask.windowed(self.window)
        return scores.masked_fill(~seen.dense(), -torch.inf)


@dataclass(frozen=True, eq=False)
class Chosen(Case):
    """A choice of blocks. `find_pairs` returns the visible pairs (H, T, T) of a row."""

    extension: BlockChoice
    find_pairs: Callable[[Tensor, Tensor, Mask], Tensor]
    tokens: int
    edge: int
    has_parts: bool = True

    @property
    def refused(self):
        tree, some = Mask.tree([self.tokens - 8, 4, 4], [None, 0, 0]), torch.ones(1)
        return (
            ({"softcap": 2.0}, "sparse or softcap, got both"),
            ({"mask": None}, "causal=True or a mask of causal documents with sparse, got none"),
            ({"mask": Mask.window(self.tokens, 5)}, "causal documents"),
            ({"mask": tree}, "causal documents"),
            ({"choose_by": (some, some)}, "choose_by"),
            ({"sparse": None}, "ranks differ in sparse"),
            ({"sparse": replace(self.extension, topk=4)}, "ranks differ in sparse"),
            ({"scores": by_segments(self.mask), "bias": TABLE}, "sparse or a bias, got both"),
        )

    @property
    def mask(self) -> Mask:
        return Mask.causal(self.tokens)

    def scores(self, q, k, mask, tensors):
        visible = self.find_pairs(q.detach(), k[:, :: HEADS // self.kv_heads].detach(), mask)
        return multiply(q, k).masked_fill(~visible, -torch.inf)


def derive_choosers(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return other queries and keys than those of attention, to choose blocks by."""
    return q.detach().flip(-1), k.detach() * torch.linspace(-1, 1, SIZE, dtype=k.dtype)


@dataclass(frozen=True, eq=False)
class ChosenByOthers(Chosen):
    """A choice of blocks by other queries and keys."""

    refused: ClassVar = (({"choose_by": None}, "choose_by together with use_nope"),)

    def options(self, masks, tensors):
        choosers = derive_choosers(tensors["q"], tensors["k"])
        return {"mask": masks, "sparse": self.extension, "choose_by": choosers}

    def scores(self, q, k, mask, tensors):
        by_q, by_k = derive_choosers(q, k[:, :: HEADS // self.kv_heads])
        return multiply(q, k).masked_fill(~self.find_pairs(by_q, by_k, mask), -torch.inf)


def find_moba_pairs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    size, visible = MOBA.block_size, torch.zeros(q.shape[1], len(q), len(q), dtype=torch.bool)
    ratio = q.shape[1] // k.shape[1]
    for start, stop in (s.q for s in mask.slices):
        for i in range(start, stop):
            own = (i - start) // size
            visible[:, i, start + own * size : i + 1] = True
            blocks = [slice(start + b * size, start + (b + 1) * size) for b in range(own)]
            for h in range(q.shape[1]):
                scores = [k[block, h // ratio].mean(0) @ q[i, h] for block in blocks]
                for b in sorted(range(own), key=lambda b: -scores[b])[: MOBA.topk]:
                    visible[h, i, blocks[b]] = True
    return visible


def find_infllm_pairs(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """tests/test_sparse.py compares the choice with its definition."""
    chosen, at = choose(q, k, mask, INFLLM), torch.arange(len(q))
    starts = torch.zeros_like(at)
    for start, stop in (s.q for s in mask.slices):
        starts[start:stop] = start
    blocks = (at - starts) // INFLLM.block_size  # of keys, each in its own document
    of_groups = (chosen.unsqueeze(-1) == blocks).any(-2).transpose(0, 1)
    seen = (at <= at.unsqueeze(1)) & (starts == starts.unsqueeze(1))
    return seen & of_groups.repeat_interleave(q.shape[1] // k.shape[1], 0)


OTHER, REACH = 10, 3
PAIRS = (BY_DISTANCE, 7, 8), (9, BY_DISTANCE, 7), (8, 9, BY_DISTANCE)


def find_row(i: int, j: int) -> int:
    """Return the row of a pair. Groups have 25 tokens, in segments of 9, 9 and 7."""
    if i // 25 != j // 25:
        return OTHER
    row = PAIRS[i % 25 // 9][j % 25 // 9]
    return row if row != BY_DISTANCE else max(min(j - i, REACH), -REACH) + REACH


def by_segments(mask: Mask) -> Scores:
    at = torch.arange(mask.seq_len)
    segment = at % 25 // 9
    pairs, distances = torch.tensor(PAIRS).flatten(), torch.arange(2 * REACH + 1)
    numbers = (x.int() for x in (at // 25, 3 * segment, segment, pairs, distances))
    return Scores(mask, *numbers, OTHER)


@dataclass(frozen=True, eq=False)
class Biased(Case):
    """A learned bias. With as many kv heads as heads, areas of one row have calls of their own."""

    kv_heads: int
    tokens: int = 61
    edge: int = 13
    holds_nan: bool = False  # all tiles of a call are one product, in which 0 times NaN is NaN
    learned: ClassVar = {"bias": TABLE}
    extension: ClassVar = Bias(None)
    refused: ClassVar = (
        ({"softcap": 2.0}, "expected softcap or a bias, got both"),
        ({"bias": None}, "expected scores and bias together, got scores alone"),
        ({"scores": None}, "expected scores and bias together, got a bias alone"),
        ({"scores": Scores.by_distance(Mask.causal(61), torch.zeros(1).int())}, "differ in scores"),
        ({"bias": TABLE[:9]}, "bias must have 11 rows, as scores need, got 9"),
        ({"bias": TABLE[:, :3]}, "bias must be (rows, 4 heads), got shape (11, 3)"),
        ({"bias": torch.cat((TABLE, TABLE))}, "ranks differ in bias rows"),
        ({"bias": TABLE.float()}, "bias must be torch.float64"),
    )

    def options(self, masks, tensors):
        scores = list(map(by_segments, masks)) if isinstance(masks, list) else by_segments(masks)
        return {"mask": None, "scores": scores, "bias": tensors["bias"]}

    def scores(self, q, k, mask, tensors):
        at = range(len(q))
        rows = torch.tensor([[find_row(i, j) for j in at] for i in at])
        added = multiply(q, k) + tensors["bias"][rows].permute(2, 0, 1)
        return added.masked_fill(~mask.dense(), -torch.inf)


class WarmWithTensor(Warm):
    """An extension whose terms no rank can compare."""

    def terms(self, tensors):
        return {"temperatures": tensors[0]}


@dataclass(frozen=True, eq=False)
class Warmed(Case):
    """Scores times a number for each head."""

    tokens: int = 40
    edge: int = 9
    extension: ClassVar = Warm()
    learned: ClassVar = {"factors": torch.linspace(0.5, 1.5, HEADS, dtype=torch.float64)}
    refused: ClassVar = (
        ({"choose_by": (torch.ones(3).double(),)}, "expected 4 temperatures, got (3,)"),
        ({"sparse": None, "choose_by": None}, "ranks differ in temperatures"),
        ({"sparse": WarmWithTensor()}, "expected one of these as a term, got Tensor"),
    )

    def options(self, masks, tensors):
        return {"mask": masks, "sparse": self.extension, "choose_by": (tensors["factors"],)}

    def scores(self, q, k, mask, tensors):
        scores = multiply(q, k) * tensors["factors"].view(-1, 1, 1)
        return scores.masked_fill(~mask.dense(), -torch.inf)


@dataclass(frozen=True, eq=False)
class Recurrent(Case):
    """Lightning attention, with these slopes or with a log_decay of each token."""

    slopes: Slopes
    tokens: int = 61
    edge: int = 16  # the tokens of a chunk
    kv_heads: int = HEADS
    has_parts: bool = True
    is_softmax: ClassVar = False

    @property
    def extension(self):
        return Lightning(self.slopes, SCALE)

    @property
    def learned(self):
        return {} if self.slopes else {"log_decay": LOG_DECAY}

    @property
    def refused(self):
        tokens, log_decay = self.tokens, torch.zeros(1)
        seen_by_all = Slice((0, tokens), (0, 2)), Slice((2, tokens), (2, tokens), 0)
        padded = (Mask(tokens, (Slice(x, x, 0),)) for x in ((1, tokens), (0, tokens - 1)))
        padding = "see nothing: make such padding a document of its own, with {} and {} among"
        return (
            ({"mask": Mask.window(tokens, 3)}, "causal documents"),
            ({"mask": Mask.documents((0, 4, tokens), causal=False)}, "causal documents"),
            ({"mask": Mask(tokens, seen_by_all)}, "causal documents"),
            ({"mask": next(padded)}, padding.format(0, 1)),
            ({"mask": next(padded)}, padding.format(tokens - 1, tokens)),
            ({"softcap": 2.0}, "no softmax"),
            ({"sinks": SINKS}, "no softmax"),
            ({"strategy": "ulysses"}, "no strategies such as ulysses"),
            ({"slopes": None, "log_decay": None}, "expected slopes, or log_decay of each token"),
            ({"slopes": RATES, "log_decay": log_decay}, "or log_decay of each token, got both"),
            ({"slopes": RATES / 2, "log_decay": None}, "ranks differ in slopes"),
            ({"scale": 2.0}, "ranks differ in scale"),
            ({"mask": Mask.documents((0, 3, tokens))}, "ranks differ in mask"),
            ({"layout": "contiguous"}, "ranks differ in layout"),
        )

    def define(self, mask, tensors):
        rates, begins = tensors.get("log_decay", RATES), {s.q[0] for s in mask.slices}
        return {"out": recurrence(*(tensors[x] for x in "qkv"), rates, SCALE, [begins])}

    def call(self, masks, tensors, **options):
        slopes, log_decay = RATES if self.slopes else None, tensors.get("log_decay")
        given = {"slopes": slopes, "log_decay": log_decay, "scale": SCALE}
        qkv = (tensors[x] for x in "qkv")
        return {"out": lightning_attn_func(*qkv, **given | {"mask": masks} | options)}

    def call_part(self, part, mask, tensors):
        given = [tensors[x] for x in ("q", "k", "v", *self.learned)]
        return part.mix(0, self.extension, *given)


MOBA = MoBA(block_size=4, topk=2)
INFLLM = InfLLMV2(block_size=8, kernel_size=4, kernel_stride=2, window_size=8, topk=2, dense_len=-1)
INFLLM_PAIRS = find_infllm_pairs, 113, INFLLM.exact_tokens
CASES = {
    "softmax": Plain(),
    "window": Plain(window=11),
    "softcap": Plain(softcap=2.0),
    "moba": Chosen(MOBA, find_moba_pairs, tokens=61, edge=12),
    "infllm-v2": Chosen(INFLLM, *INFLLM_PAIRS),
    "infllm-v2 by others": ChosenByOthers(replace(INFLLM, use_nope=True), *INFLLM_PAIRS),
    "bias": Biased(HEADS),
    "bias of groups": Biased(2),
    "temperatures": Warmed(),
    "lightning": Recurrent(tuple(RATES.tolist())),
    "lightning by tokens": Recurrent(None),
}
KINDS = "one", "odd", "borders", "padded"
LAYOUTS = "zigzag", "balanced", "contiguous", "striped"
RANKS = 1, 2, 4, 5
# Kinds of documents and ranks. Those of whole sequences meet each layout on several ranks.
WHOLE = [
    *(("one", ranks) for ranks in (1, 3, 8)),
    *(("odd", ranks) for ranks in (2, 3, 4)),
    *(("borders", ranks) for ranks in (3, 4)),
    *(("padded", ranks) for ranks in (3, 4)),
]
RAGGED = "odd", "borders"


def cases(condition: Callable[[Case], bool]) -> Any:
    chosen = {name: case for name, case in CASES.items() if condition(case)}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


each_extension = cases(lambda case: case.extension)
each_choice = cases(lambda case: type(case) is Chosen)


@pytest.fixture(autouse=True)
def _short_areas(monkeypatch):
    monkeypatch.setattr(areas, "_LONG", 4)


def quarter(case: Case) -> int:
    """Return the tokens of a chunk."""
    return -(-case.tokens // 4)


def documents(case: Case, kind: str) -> Mask:
    """Return a mask of one document, of odd ones, of ones at the borders of chunks, of two with
    padding, which is tokens of none or else documents, or of ones about as long as the edge.
    """
    tokens = case.tokens
    if kind == "padded" and case.is_softmax:
        spans = (0, tokens - 20), (tokens - 16, tokens - 3)
        return Mask(tokens, tuple(Slice(span, span, low=0) for span in spans))
    if kind == "edges":
        lengths = case.edge - 1, 1, case.edge, case.edge + 1, 3, 2 * case.edge - 1
        return Mask.documents([*itertools.accumulate(lengths, initial=0)])
    cuts = {
        "one": [],
        "odd": [5, 9, tokens // 2 + 3],
        "borders": [start for start, _ in Layout.chunks(tokens, 1, quarter(case)).spans[1:3]],
        "padded": [tokens - 20, tokens - 16, tokens - 3],
    }
    return Mask.documents((0, *cuts[kind], tokens))


def make_tensors(case: Case, tokens: int, batch: int = 1, sinks: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a call, and the gradients dout and dlse of its results."""
    q, k, v, dout = random_qkv(batch, tokens, HEADS, case.kv_heads, SIZE)
    named = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dout[..., 0].transpose(1, 2)}
    learned = {x: y[:batch] if x in DIMS else y for x, y in case.learned.items()}
    return named | learned | ({"sinks": SINKS} if sinks and case.is_softmax else {})


def find_leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name: x for name, x in tensors.items() if name not in ("dout", "dlse")}
    return {name: x.detach().clone().requires_grad_() for name, x in named.items()}


def differentiate(
    results: dict[str, Tensor], leaves: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the results, and the gradients by the names of their tensors."""
    given = [tensors[f"d{name}"] for name in results]
    grads = torch.autograd.grad(list(results.values()), list(leaves.values()), given)
    found = {name: x.detach() for name, x in results.items()}
    return found | dict(zip(leaves, grads, strict=True))


@functools.cache
def expected_of(
    case: Case, *kinds: str, sinks: bool = True, names: Sequence[str] = ("out", "lse")
) -> dict[str, Tensor]:
    """Return results and gradients of rows from the definition, of `names` with a gradient."""
    masks, each = [documents(case, kind) for kind in kinds], []
    tensors = make_tensors(case, masks[0].seq_len, len(kinds), sinks)
    for row, mask in enumerate(masks):
        own = {x: y[row : row + 1] if x in ROWS else y for x, y in tensors.items()}
        leaves = find_leaves(own)
        results = case.define(mask, leaves)
        each.append(differentiate({x: results[x] for x in names if x in results}, leaves, own))
    return {
        x: torch.cat([row[x] for row in each]) if x in ROWS else sum(row[x] for row in each)
        for x in each[0]
    }


def over_ranks(
    case: Case,
    layout: Layout,
    masks: Mask | list[Mask],
    tensors: dict[str, Tensor],
    inner: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the whole results and gradients of simulated ranks, `inner` of them a host."""

    def work(ring):
        own = shard(layout, ring.rank, tensors)
        leaves, groups = find_leaves(own), ring_arguments(ring, inner or ring.size)
        return differentiate(
            case.call(masks, leaves, layout=layout, **groups, **options), leaves, own
        )

    return join_results(layout, simulate(layout.size, work))


def shard(layout: Layout, rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {x: layout.shard(y, rank, DIMS[x]) if x in DIMS else y for x, y in tensors.items()}


def join_results(layout: Layout, results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors of all ranks' results: shards along DIMS, and shares of sums."""
    return {
        name: layout.unshard([x[name] for x in results], DIMS[name])
        if name in DIMS
        else sum(x[name] for x in results)
        for name in results[0]
    }


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=CLOSE, msg=name)


@each_extension
@pytest.mark.parametrize(("kind", "ranks"), WHOLE)
def test_whole_sequences(case, ranks, kind):
    """Some rings are double, and some spans are short."""
    number, mask = KINDS.index(kind), documents(case, kind)
    layouts = LAYOUTS if case.is_softmax else LAYOUTS[:-1]
    layout = made_layout(layouts[(number + ranks) % len(layouts)], mask, ranks)
    options = {"inner": 2} if ranks in (4, 8) and number < 2 else {}
    if case.is_softmax:
        options |= {"strategy": "all-gather"} if number % 2 else {"group_bytes": 3000}
    found = over_ranks(case, layout, mask, make_tensors(case, case.tokens, sinks=False), **options)
    check_close(found, expected_of(case, kind, sinks=False))


@cases(lambda case: not case.is_softmax)
def test_striped_layouts_are_refused_without_softmax(case):
    layout, tensors = Layout.striped(case.tokens, 2), make_tensors(case, case.tokens)

    def work(ring):
        own = shard(layout, ring.rank, tensors)
        with pytest.raises(ValueError, match=r"consecutive tokens, got .*striped.*layout='zigzag'"):
            case.call(documents(case, "one"), own, layout=layout, process_group=ring)

    simulate(2, work)


@cases(lambda case: case.extension and case.is_softmax)
@pytest.mark.parametrize("strategy", strategies.names())
def test_strategies(case, strategy):
    """Those that cannot plan it refuse it by its name."""
    mask, found = documents(case, "edges"), strategies.load(strategy)
    tensors = make_tensors(case, mask.seq_len)
    layout, options = made_layout("balanced", mask, 2), {"strategy": strategy}
    if not found.takes_scorings and not isinstance(case, Chosen):
        with pytest.raises(ValueError, match=f"dense attention only, not {case.extension.name}"):
            over_ranks(case, layout, mask, tensors, **options)
        return
    expected = expected_of(case, "edges")
    check_close(over_ranks(case, layout, mask, tensors, **options), expected)
    if found.takes_hosts:
        layout = Layout.zigzag(mask.seq_len, 4)
        check_close(over_ranks(case, layout, mask, tensors, inner=2, **options), expected)


@each_extension
def test_rows_have_documents_of_their_own(case):
    masks, tensors = [documents(case, kind) for kind in RAGGED], make_tensors(case, case.tokens, 2)
    found = over_ranks(case, Layout.zigzag(case.tokens, 3), masks, tensors)
    check_close(found, expected_of(case, *RAGGED))


@cases(lambda case: case.has_parts)
@pytest.mark.parametrize("ranks", RANKS)
def test_chunks(case, ranks):
    """Forward and backward, with documents across, at and within borders of chunks."""
    kinds = RAGGED[: 1 if ranks == 5 else 2]
    masks = [documents(case, x) for x in kinds]
    tensors = make_tensors(case, case.tokens, len(kinds))

    def work(ring):
        chunks, found = Chunks(masks, quarter(case), 1, share(ring)), []
        for chunk in chunks.forward():
            case.call_part(chunk, masks[0], cut(tensors, chunk))
        for chunk in chunks.backward():
            own = cut(tensors, chunk)
            leaves = find_leaves(own)
            results = {"out": case.call_part(chunk, masks[0], leaves)}
            found.insert(0, differentiate(results, leaves, own))
        return chunks.layout, {
            x: torch.cat([part[x] for part in found], 1)
            if x in DIMS
            else sum(part[x] for part in found)
            for x in found[0]
        }

    layouts, results = zip(*simulate(ranks, work), strict=True)
    check_close(join_results(layouts[0], results), expected_of(case, *kinds, names=("out",)))


def cut(tensors: dict[str, Tensor], chunk: Any) -> dict[str, Tensor]:
    return {x: chunk.shard(y) if x in DIMS else y for x, y in tensors.items() if x != "dlse"}


@cases(lambda case: case.has_parts)
@pytest.mark.parametrize(
    ("new", "ranks"), [*((24, ranks) for ranks in RANKS), (None, 1), (None, 3)]
)
def test_prompts_and_new_tokens(case, ranks, new):
    """New tokens alone and several at once, after a prompt that ends within a block, or none."""
    mask, tensors = documents(case, "one"), make_tensors(case, case.tokens)
    prompt = case.tokens - (new or case.tokens)

    def work(ring):
        cache, found = Cache(share(ring), 1, case.tokens), []
        with torch.no_grad():
            for chunk in cache.prefill(prompt, quarter(case)) if prompt else ():
                case.call_part(chunk, mask, cut(span_of(tensors, 0, prompt), chunk))
            for span in itertools.pairwise((prompt, prompt + 1, prompt + 13, case.tokens)):
                own = span_of(tensors, *span)
                found.append(case.call_part(cache, mask, own))
        return torch.cat(found, 1)

    expected = expected_of(case, "one")["out"][:, prompt:]
    for found in simulate(ranks, work):
        check_close({"out": found}, {"out": expected})


def share(ring: Any) -> SequenceParallel:
    """Return a rank's place. Four ranks are two hosts."""
    groups = {"process_group": None} | ring_arguments(ring, 2 if ring.size == 4 else ring.size)
    return SequenceParallel(ring.rank, ring.size, **groups)


def span_of(tensors: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {x: y[:, start:stop] if x in DIMS else y for x, y in tensors.items() if x != "dlse"}


@cases(lambda case: not case.has_parts)
def test_parts_are_refused_by_name_on_all_ranks(case):
    mask, tensors = documents(case, "one"), make_tensors(case, case.tokens, sinks=False)

    def work(ring):
        sp = share(ring)

        def refuse(part, own):
            with pytest.raises(ValueError) as caught:
                case.call_part(part, mask, own)
            return str(caught.value)

        errors = [refuse(Cache(sp, 1, case.tokens), tensors)]
        prompt = Cache(sp, 1, case.tokens).prefill(case.tokens, 16)
        for loop in (Chunks(mask, 16, 1, sp).forward(), prompt):
            with closing(loop):
                chunk = next(loop)
                errors.append(refuse(chunk, cut(tensors, chunk)))
        return errors

    for errors in simulate(2, work):
        reason = f"{case.extension.name} has no chunks, prompts or new tokens"
        assert all(reason in error for error in errors), errors


@cases(lambda case: case.holds_nan)
def test_nan_stays_in_its_document(case):
    """It reaches neither the documents before nor those after it, on the same ranks or others."""
    mask, layout = documents(case, "odd"), Layout.zigzag(case.tokens, 3)
    tensors = make_tensors(case, case.tokens, sinks=False)
    clean = over_ranks(case, layout, mask, tensors)
    for start, stop in mask.parts[1:3]:
        broken = {x: y.clone() for x, y in tensors.items()}
        for x in broken.keys() & DIMS:
            broken[x].narrow(DIMS[x], start, stop - start).fill_(torch.nan)
        found = over_ranks(case, layout, mask, broken)
        assert found["out"][:, start:stop].isnan().all()
        others = torch.tensor([at for at in range(case.tokens) if not start <= at < stop])
        for x in found.keys() & DIMS:
            one, other = (each[x].index_select(DIMS[x], others) for each in (found, clean))
            assert one.equal(other), x


@each_extension
def test_what_excludes_it_is_refused_on_all_ranks(case):
    """One rank passes it. The others name this rank and its error. Then all ranks can go on."""
    layout, mask = Layout.zigzag(case.tokens, 2), documents(case, "one")
    tensors = make_tensors(case, case.tokens, sinks=False)

    def work(ring):
        own, texts = shard(layout, ring.rank, tensors), []
        for options, _ in case.refused:
            with pytest.raises((ValueError, TypeError)) as caught:
                case.call(mask, own, process_group=ring, **(options if ring.rank else {}))
            texts.append(str(caught.value))
        return texts, case.call(mask, own, process_group=ring)

    expected = expected_of(case, "one", sinks=False)["out"]
    texts, results = zip(*simulate(2, work), strict=True)
    for (_, message), *found in zip(case.refused, *texts, strict=True):
        assert all(message in text for text in found), found
    check_close({"out": layout.unshard([x["out"] for x in results])}, {"out": expected})


@each_choice
def test_short_documents_are_dense_to_the_bit(case):
    mask = Mask.documents((0, case.edge, case.edge + 9))
    layout, tensors = Layout.zigzag(mask.seq_len, 2), make_tensors(case, mask.seq_len)
    found = over_ranks(case, layout, mask, tensors)
    dense = over_ranks(case, layout, mask, tensors, sparse=None)
    assert all(x.equal(dense[name]) for name, x in found.items())


@each_choice
def test_configurations_and_layers(case):
    """A layer refuses what excludes it."""
    assert read_extension(write_extension(case.extension)) == case.extension
    for option in ({"window": 3}, {"softcap": 2.0}):
        [name] = option
        with pytest.raises(ValueError, match=f"expected sparse or {name}, got "):
            BurstAttention(32, 4, sparse=case.extension, **option)
