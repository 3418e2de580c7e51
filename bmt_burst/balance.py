"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Ranks are filled one after the other, each with its share of the tokens and of the work: with the densest documents that
fit, then, as those need room, with the sparsest ones. Dense documents have much work for each token (visible pairs of its
query). What is still missing, some tokens that need some work, is a document of just that size or is peeled off one: as
many tokens off its start, which see little, and off its end, which see much, as give that work. The next rank begins
with the rest of that document, so a rank cuts one document, and a long document goes to as few ranks as can hold it.
For one causal document that is the zigzag layout, for a window or a full mask nearly the contiguous one.

Since every rank gets just its share, what is left always has the mean density, and so the last rank fares as the first.

Documents are the parts of a mask that see nothing of each other. Plain numbers, no torch; the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import accumulate

from .mask import Mask, Slice
from .span import Span, length, merged

_SLACK = 0.005  # of a rank's work: how far it may be from its share; the next rank makes up for it
_FEW = 32  # tokens: shorter pieces of a document are avoided
_TRIES = 8  # how many numbers of sparse documents are tried to find one after which a whole document fits
_BENT = 0.2  # of the work of a piece of a long document: how far from the document's mean it may be


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """The positions of each rank: `mask.seq_len` tokens cut over `size` ranks, the first ones a token longer."""
    pool = _Pool(_documents(mask))
    area = sum(document.work for document in pool.documents)
    small, longer = divmod(mask.seq_len, size)
    slack = int(area * _SLACK / size)
    done, spans = 0, []
    for number in range(size):
        rank = _Rank(small + (number < longer), area * (number + 1) // size - done, slack)
        if number < size - 1:
            _fill(rank, pool)
        else:
            for document in pool.documents + [pool.cut] * (pool.cut is not None):
                rank.take(document)
        done += rank.got
        spans.append(merged(rank.spans))
    return spans


class _Document:
    """What is left of a document: positions start to stop - 1 of the mask."""

    __slots__ = ("density", "seen", "start", "stop", "tokens", "work")

    def __init__(self, start: int, stop: int, seen: Callable[[int], int]):
        self.seen = seen  # of a position: visible pairs of the document's queries before it
        self.cut_to(start, stop)

    def cut_to(self, start: int, stop: int) -> None:
        self.start, self.stop, self.tokens = start, stop, stop - start
        self.work = self.seen(stop) - self.seen(start)
        self.density = self.work / self.tokens if self.tokens else 0.0

    def ends(self, tokens: int) -> Callable[[int], int]:
        """The work of `tokens` off the ends, as a function of how many of them are early ones."""
        seen, start, late = self.seen, self.start, self.stop - tokens
        fixed = seen(self.stop) - seen(start)
        return lambda early: fixed + seen(start + early) - seen(late + early)

    @property
    def order(self) -> tuple[float, int, int]:
        return self.density, self.tokens, self.start


class _Rank:
    """What a rank still has to get, and the spans it has."""

    def __init__(self, tokens: int, work: int, slack: int):
        self.tokens, self.work, self.slack = tokens, work, slack
        self.got = 0
        self.spans: list[Span] = []

    def take(self, document: _Document) -> None:
        """All of a document."""
        self._add(document.tokens, document.work, (document.start, document.stop))

    def peel(self, document: _Document, tokens: int, work: int) -> None:
        """So many tokens off the ends of a document, such that they have nearly so much work."""
        of = document.ends(tokens)
        early = _matching(of, tokens, work, self.slack // 2)
        start, stop = document.start, document.stop
        self._add(tokens, of(early), (start, start + early), (stop - tokens + early, stop))
        document.cut_to(start + early, stop - tokens + early)

    def _add(self, tokens: int, work: int, *spans: Span) -> None:
        self.tokens -= tokens
        self.work -= work
        self.got += work
        self.spans += spans


class _Pool:
    """The documents that no rank has, the sparsest first, and sums over them.

    tokens, work  of the first 0, 1, 2, ... documents, and of those that the sums once began with
    cut           the document that the last rank cut, which is none of these
    """

    def __init__(self, documents: list[_Document]):
        self.documents = sorted(documents, key=lambda d: d.order)
        self.tokens = list(accumulate((d.tokens for d in self.documents), initial=0))
        self.work = list(accumulate((d.work for d in self.documents), initial=0))
        self.cut: _Document | None = None

    def pop_densest(self) -> _Document:
        del self.tokens[-1], self.work[-1]
        return self.documents.pop()

    def pop(self, index: int) -> _Document:
        document = self.documents.pop(index)
        for sums, less in ((self.tokens, document.tokens), (self.work, document.work)):
            sums[index + 1 :] = [x - less for x in sums[index + 2 :]]
        return document

    def insert(self, document: _Document) -> None:
        insort(self.documents, document, key=lambda d: d.order)
        self.tokens = list(accumulate((d.tokens for d in self.documents), initial=0))
        self.work = list(accumulate((d.work for d in self.documents), initial=0))

    def pop_sparsest(self, count: int) -> list[_Document]:
        found = self.documents[:count]
        del self.documents[:count], self.tokens[:count], self.work[:count]
        return found

    def sparsest(self, tokens: int) -> int:
        """The work of so many of the sparsest tokens, or of all that there are."""
        count = bisect_right(self.tokens, self.tokens[0] + tokens) - 1
        work = self.work[count] - self.work[0]
        if count < len(self.documents):
            work += int((self.tokens[0] + tokens - self.tokens[count]) * self.documents[count].density)
        return work

    def densest(self, tokens: int) -> int:
        return self.work[-1] - self.work[0] - self.sparsest(max(self.tokens[-1] - self.tokens[0] - tokens, 0))

    def fits(self, document: _Document, rank: _Rank) -> bool:
        """Whether the rank can have all of it, and sparse documents for the rest of its tokens."""
        room = rank.tokens - document.tokens
        return room >= 0 and document.work + self.sparsest(room) <= rank.work + rank.slack


def _fill(rank: _Rank, pool: _Pool) -> None:
    """Gives a rank its tokens and its work, and leaves a document in `pool.cut` if one had to be cut."""
    if pool.cut is None and not pool.fits(pool.documents[-1], rank):
        pool.cut = pool.pop_densest()
    if pool.cut is not None:
        document, pool.cut = pool.cut, None
        if pool.fits(document, rank) and pool.densest(rank.tokens - document.tokens) + document.work >= rank.work - rank.slack:
            rank.take(document)
        elif document.density * rank.tokens < rank.work - rank.slack:
            pool.insert(document)  # by itself it has too little work: others are to begin with
        else:
            _split(document, rank, pool)
            return
    _take_dense(rank, pool)
    if rank.tokens and not _finish(rank, pool):
        _split(pool.pop_densest(), rank, pool)


def _take_dense(rank: _Rank, pool: _Pool) -> None:
    """Gives a rank the densest documents that fit, while they are denser than what it needs."""
    index = len(pool.documents) - 1
    while index >= 0 and rank.work - pool.sparsest(rank.tokens) > rank.slack:
        if not pool.fits(pool.documents[index], rank):
            index = bisect_left(pool.documents, True, 0, index, key=lambda d: not pool.fits(d, rank)) - 1
            if index < 0:
                return
        if pool.documents[index].density * rank.tokens < rank.work - rank.slack:
            return
        rank.take(pool.pop(index))
        index -= 1


def _finish(rank: _Rank, pool: _Pool) -> bool:
    """Gives a rank sparse documents, and one more or a piece of one; False if none would give it its work."""
    tokens, work = rank.tokens + pool.tokens[0], rank.work + pool.work[0]
    best = None
    most = bisect_right(pool.tokens, tokens) - 1
    for dropped in _counts(most):
        count = most - dropped
        if dropped > _TRIES and best is not None:
            break
        found = _filler(pool, count, tokens - pool.tokens[count], work - pool.work[count], rank.slack)
        if found is not None and (best is None or found < best):
            best = found
            if found[0] == 0:
                break
    if best is None:
        return False
    _, _, count, index = best
    document = pool.pop(index) if index is not None else None
    for sparse in pool.pop_sparsest(count):
        rank.take(sparse)
    if document is not None:
        rank.peel(document, rank.tokens, rank.work)
        pool.cut = document if document.tokens else None
    return True


def _counts(most: int):
    for x in range(min(most, _TRIES) + 1):
        yield x
    x = _TRIES
    while x < most:
        x = min(x * 2, most)
        yield x


def _filler(pool: _Pool, count: int, tokens: int, work: int, slack: int):
    """The document after the first `count` of which so many tokens can have so much work: (badness, tokens, count, index)."""
    if tokens == 0:
        return (0, 0, count, None) if abs(work) <= slack else None

    def enough(d: _Document) -> bool:
        if d.tokens < tokens:
            return False
        of = d.ends(tokens)
        return max(of(0), of(tokens)) >= work - slack

    index = bisect_left(pool.documents, True, count, key=enough)
    if index == len(pool.documents):
        return None
    document = pool.documents[index]
    if document.tokens < tokens:
        return None
    if document.tokens == tokens:
        return (0, 0, count, index) if abs(document.work - work) <= slack else None
    of = document.ends(tokens)
    ends = of(0), of(tokens)
    if not min(ends) - slack <= work <= max(ends) + slack:
        return None
    sliver = min(tokens, document.tokens - tokens) < _FEW
    return (1 + sliver, document.tokens, count, index)


def _split(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Gives a rank sparse documents and, for the rest of its tokens and work, a piece of a long document."""
    tokens, work = rank.tokens + pool.tokens[0], rank.work + pool.work[0]

    def excess(count: int, more: int = 0) -> float:
        """Of work, if the document fills up so many sparse ones and a piece of the next."""
        piece = tokens - pool.tokens[count] - more
        return pool.work[count] - work + _fair(document, piece)

    most = bisect_right(pool.tokens, tokens) - 1
    count = max(bisect_left(range(most + 1), True, key=lambda k: excess(k) < 0) - 1, 0)
    best = None
    for k in (count, count + 1):
        if k <= most:
            p, q = tokens - pool.tokens[k], work - pool.work[k]
            if 0 < p <= document.tokens and _reaches(document, p, q, rank.slack):
                off = abs(q - p * document.density)
                if off <= max(_BENT * q, rank.slack) and (best is None or off < best[0]):
                    best = off, k
    piece = 0
    if best is not None:
        count = best[1]
    elif count < len(pool.documents):
        sparse = pool.documents[count]
        room = tokens - pool.tokens[count]
        ends = min(room, sparse.tokens)
        first, last = excess(count), excess(count, ends) + ends * sparse.density
        piece = round(ends * first / (first - last)) if first > last else 0
        piece = min(max(piece, room - document.tokens, 0), ends)
    for sparse in pool.pop_sparsest(count):
        rank.take(sparse)
    if piece:
        _peel_sparsest(rank, pool, piece)
    if rank.tokens:
        rank.peel(document, min(rank.tokens, document.tokens), rank.work)
    pool.cut = document if document.tokens else None
    while rank.tokens:
        _peel_sparsest(rank, pool, rank.tokens)


def _peel_sparsest(rank, pool, tokens):
    sparse = pool.documents[0]
    tokens = min(tokens, sparse.tokens)
    before = rank.work
    rank.peel(sparse, tokens, int(sparse.density * tokens))
    pool.tokens[0] += tokens
    pool.work[0] += before - rank.work
    if not sparse.tokens:
        pool.pop_sparsest(1)


def _fair(document, tokens):
    """The work of so many tokens off a document's ends, as near to their share as can be."""
    if tokens >= document.tokens:
        return tokens * document.density
    of = document.ends(tokens)
    low, high = sorted((of(0), of(tokens)))
    return min(max(tokens * document.density, low), high)


def _reaches(document: _Document, tokens: int, work: int, slack: int) -> bool:
    of = document.ends(tokens)
    ends = of(0), of(tokens)
    return min(ends) - slack <= work <= max(ends) + slack


def _matching(of: Callable[[int], int], tokens: int, work: float, near: float) -> int:
    """The number of early tokens, 0 to `tokens`, with which the work `of` it is near, or nearest, to the wanted one."""
    low, high = (0, of(0)), (tokens, of(tokens))
    for count, found in (low, high):
        if abs(found - work) <= near:
            return count
    if (low[1] - work) * (high[1] - work) > 0:  # out of reach
        return min((low, high), key=lambda end: abs(end[1] - work))[0]
    while high[0] - low[0] > 1:
        share = (low[1] - work) / (low[1] - high[1])
        step = round((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        middle = min(max(low[0] + step, low[0] + 1), high[0] - 1)
        found = of(middle)
        if abs(found - work) <= near:
            return middle
        if (found - work) * (low[1] - work) > 0:
            low = middle, found
        else:
            high = middle, found
    return min((low, high), key=lambda end: abs(end[1] - work))[0]


def _documents(mask: Mask) -> list[_Document]:
    """The parts of the mask."""
    parts = mask.parts
    slices: list[list[Slice]] = [[] for _ in parts]
    starts = [start for start, _ in parts]
    for s in mask.slices:
        slices[bisect_right(starts, s.q[0]) - 1].append(s)
    return [_Document(*span, _seen(*span, found)) for span, found in zip(parts, slices, strict=True)]


def _seen(start: int, stop: int, slices: Sequence[Slice]) -> Callable[[int], int]:
    """The visible pairs of a part's queries before a position, as a function of it: in closed form if it is simple."""
    size = stop - start
    if len(slices) == 1 and slices[0].q == slices[0].kv == (start, stop):
        low, high = slices[0].low, slices[0].high
        if low is None and high is None:
            return lambda i: (i - start) * size
        if low == 0:
            return lambda i: _ramp(i - start, size if high is None else high)
        if high is not None and low == 1 - high:
            later = _ramp(size - 1, high - 1)
            return lambda i: _ramp(i - start, high) + later - _ramp(stop - i - 1, high - 1)
    return lambda i: sum(Slice((q[0], min(q[1], i)), *rest).area for q, *rest in slices if q[0] < i)


def _ramp(count: int, most: int) -> int:
    """The sum of 1, 2, 3, ... over so many numbers, of which those above `most` count as that."""
    return count * (count + 1) // 2 if count <= most else count * most - most * (most - 1) // 2
