"""The balanced layout: each token once, nearly equal work, few documents cut, and soon found."""

import bisect
import itertools
import math
import random
import time

import pytest

from bmt_burst.sequence.balance import balanced_spans
from bmt_burst.sequence.mask import Mask, Slice
from bmt_burst.sequence.span import length, merged
from tests.cases import random_mask

SIZES = (2, 3, 8, 24)
MOST_DOCUMENTS = 2500  # in a packing of these tests: more would only take time


def lognormal(rng, tokens, mean, most=math.inf):
    """cu_seqlens of documents of log-normal lengths with sigma 1."""
    bounds = [0]
    while bounds[-1] < tokens:
        drawn = int(min(rng.lognormvariate(math.log(mean) - 0.5, 1), most))
        bounds.append(min(bounds[-1] + max(drawn, 1), tokens))
    return bounds


def cuts(rng, tokens, documents):
    """cu_seqlens of so many documents, cut at random."""
    return [0, *sorted(rng.sample(range(1, tokens), documents - 1)), tokens]


def equal(tokens, documents):
    return [tokens * i // documents for i in range(documents + 1)]


def after(first, bounds):
    """cu_seqlens of a document of so many tokens and then others."""
    return [0, *(first + x for x in bounds)]


def prefixed(rng, bounds):
    """Causal documents with a prefix each that all of the document sees: two slices each."""
    slices = []
    for start, stop in itertools.pairwise(bounds):
        prefix = start + rng.randrange((stop - start) // 2 + 1)
        slices += [Slice((start, prefix), (start, prefix)), Slice((prefix, stop), (start, stop), 0)]
    return Mask(bounds[-1], tuple(s for s in slices if length(s.q)))


def shorts(rng, n, size):
    """Packings of documents that are all short compared with a rank's tokens."""
    yield Mask.documents(cuts(rng, n, 50 * size))
    yield Mask.documents(equal(n, 1000))
    if n // 256 <= MOST_DOCUMENTS:
        yield Mask.documents(lognormal(rng, n, 256, n // size // 8))


def longs(rng, n, size):
    """Packings with long documents, alone and among short ones."""
    for mean in (256, 1024, 4096):
        for most in (n // 4, 16384, n):
            if n // mean <= MOST_DOCUMENTS:
                yield Mask.documents(lognormal(rng, n, mean, most))
    for share in (3, 5, 7.5):
        first = int(n * share / 10)
        yield Mask.documents(after(first, lognormal(rng, n - first, max(512, n // 2000))))
        yield Mask.documents(after(first, cuts(rng, n - first, 300)))
    for documents in (1, 2, 3, 10, 100, 3 * size + 1):
        yield Mask.documents(equal(n, documents))
        yield Mask.documents(cuts(rng, n, documents))


def others(rng, n, size):
    """Masks of other kinds, and some of several kinds."""
    half = n // 2
    yield Mask.full(n)
    yield from (Mask.window(n, window) for window in (64, 1024, 4096))
    yield Mask.documents(lognormal(rng, n, 4096), causal=False)
    yield Mask.documents(lognormal(rng, n, 4096), window=1024)
    yield Mask.documents(after(half, lognormal(rng, n - half, 2048)), window=4096)
    yield prefixed(rng, [0, n])
    yield prefixed(rng, lognormal(rng, n, max(4096, n // 100)))
    full = Mask.documents(lognormal(rng, n - half, 2048), causal=False)
    yield Mask.stacked([Mask.documents(lognormal(rng, half, 4096)), full])
    yield Mask.stacked([Mask.window(half, 1024), full])


def works(mask, spans):
    """The visible pairs of each rank's queries, by the areas of slices."""
    ends = list(itertools.accumulate((s.q[1] for s in mask.slices), max))
    found = []
    for start, stop in spans:
        work = 0
        for s in mask.slices[bisect.bisect_right(ends, start) :]:
            if s.q[0] >= stop:
                break
            q = max(start, s.q[0]), min(stop, s.q[1])
            work += Slice(q, *s[1:]).area if length(q) else 0
        found.append(work)
    return sum(found)


def unevenness(mask, layout):
    """Between the ranks of most and least work, for the mean work of a rank."""
    found = [works(mask, spans) for spans in layout]
    assert sum(found) == mask.area
    return (max(found) - min(found)) * len(layout) / mask.area


def owners(mask, layout):
    """The ranks of each document."""
    starts = [start for start, _ in mask.parts]
    found = [set() for _ in starts]
    for rank, spans in enumerate(layout):
        for start, stop in spans:
            for part in range(
                bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, stop)
            ):
                found[part].add(rank)
    return found


def cut(mask, layout):
    return [ranks for ranks in owners(mask, layout) if len(ranks) > 1]


def check_shards(mask, size, layout):
    """Each position once, spans rising and merged, equal tokens, and longer ranks first."""
    small, longer = divmod(mask.seq_len, size)
    assert [sum(map(length, spans)) for spans in layout] == [
        small + (rank < longer) for rank in range(size)
    ]
    assert all(spans == merged(spans) for spans in layout)
    assert merged(itertools.chain(*layout)) == ((0, mask.seq_len),)


@pytest.mark.parametrize("seed", range(8))
def test_small_masks_of_any_kind(seed):
    rng = random.Random(seed)
    for _ in range(60):
        mask = random_mask(rng, rng.randrange(1, 70))
        for size in {1, 2, rng.randrange(1, mask.seq_len + 1), mask.seq_len} & set(
            range(1, mask.seq_len + 1)
        ):
            check_shards(mask, size, balanced_spans(mask, size))


def test_a_long_document_may_be_used_up_first():
    """Two ranks have all of it, since no short documents have just the work of a rank."""
    slices = [Slice((0, 32), (0, 2))]
    for start, keys in zip(range(32, 64, 4), (1, 1, 2, 2, 2, 2, 2, 4), strict=True):
        slices.append(Slice((start, start + 4), (start, start + keys)))
    mask = Mask(64, tuple(slices))
    check_shards(mask, 4, balanced_spans(mask, 4))


@pytest.mark.parametrize(("size", "tokens"), [(2, 32768), (3, 4096), (8, 32768), (64, 4096)])
@pytest.mark.parametrize("kind", [shorts, longs, others])
def test_work_is_equal_and_few_documents_are_cut(kind, size, tokens):
    """An arc cuts two documents at most. A document over r ranks was cut r - 1 times."""
    rng = random.Random(f"{kind.__name__} {size} {tokens}")
    for mask in kind(rng, size * tokens + 7, size):
        layout = balanced_spans(mask, size)
        check_shards(mask, size, layout)
        assert unevenness(mask, layout) < 0.02, mask
        assert sum(len(ranks) - 1 for ranks in cut(mask, layout)) <= 2 * (size - 1)


def documents_of(mask, layout):
    """How many documents each rank has, whole or in part."""
    return [sum(rank in ranks for ranks in owners(mask, layout)) for rank in range(len(layout))]


@pytest.mark.parametrize("size", SIZES)
def test_short_documents_are_shared_out_evenly(size):
    """Alone, and next to a document with half of the tokens, which is nearly the only one cut."""
    n = size * 2**15
    rng = random.Random(size)
    long = Mask.documents(after(n // 2, cuts(rng, n // 2, 50 * size)))
    for mask in (*shorts(rng, n, size), long):
        counts = documents_of(mask, balanced_spans(mask, size))
        assert max(counts) <= 1.25 * sum(counts) / size
    found = owners(long, balanced_spans(long, size))
    assert len(found[0]) == size
    assert sum(len(ranks) > 1 for ranks in found[1:]) <= size // 16


@pytest.mark.parametrize("size", SIZES)
def test_one_causal_document_is_nearly_zigzag(size):
    """The slack in work moves a bound by a few tokens."""
    n = 128 * size
    for rank, spans in enumerate(balanced_spans(Mask.causal(n), size)):
        zigzag = merged(((64 * rank, 64 * (rank + 1)), (n - 64 * (rank + 1), n - 64 * rank)))
        bounds = zip(itertools.chain(*spans), itertools.chain(*zigzag), strict=True)
        assert all(abs(bound - expected) <= size for bound, expected in bounds)


@pytest.mark.parametrize("size", SIZES)
def test_full_masks_and_short_windows_are_nearly_contiguous(size):
    n = size * 16384
    for mask, most in ((Mask.full(n), size), (Mask.window(n, 64), size + 1)):
        assert sum(map(len, balanced_spans(mask, size))) <= most


def staircase(slices):
    """One document whose queries see rectangles of many widths, as in a tree of drafts."""
    widths = [i * 7919 % slices * 8 + 1 for i in range(slices)]
    return Mask(
        16 * slices,
        tuple(Slice((16 * i, 16 * i + 16), (0, width)) for i, width in enumerate(widths)),
    )


def seconds(mask, size):
    assert mask.parts
    start = time.thread_time()
    balanced_spans(mask, size)
    return time.thread_time() - start


TIMES = [(100, 8, 0.001), (1000, 8, 0.004), (100, 512, 0.012), (1, 512, 0.005)]


@pytest.mark.parametrize(("documents", "size", "most"), TIMES)
def test_time(documents, size, most):
    """Limits are 30 times what is usual: some processors are 15 times as slow."""
    masks = [
        Mask.documents(cuts(random.Random(seed), size * 32768, documents)) for seed in range(3)
    ]
    assert min(seconds(mask, size) for mask in masks) < 30 * most


def test_time_of_many_slices():
    assert seconds(staircase(3000), 64) < 10 * 0.07
