"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents are the parts of a mask that see nothing of each other. The work of one is its visible pairs, its density that
work for each token. Ranks are filled one after the other, each with its share of the tokens and of the work: with the
densest documents that fit, and for the tokens that are left with the sparsest. What then lacks is swapped in, if there
are documents of just the right lengths, or peeled off a document: as many tokens off its start, which see little, and
off its end, which see much, as have the work that lacks. The next rank begins with the rest of that document.

As each rank gets just its share, what is left always has the mean density. So there are always denser and sparser
documents to mix, and the last rank fares as the first. A rank leaves at most two documents unfinished: the one it
peels, and, where that is so dense that it fits no rank, a sparse one. One causal document becomes the zigzag layout, a
window or a full mask nearly the contiguous one.

Balance is lost where the work is in the middle of documents: a window to both sides not much shorter than they are.

Plain numbers and no torch, and nothing is left to chance: all ranks and all versions of Python find the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from .mask import Mask, Slice
from .span import Span, merged

_SLACK = 0.005  # of the mean work of a rank: how far one may be from its share; the next rank makes up for it
_BENT = 0.2  # of the work of a long document's piece: how far that may be from the document's density
_TRIES = 8  # sparse documents that a rank may give up for another one, before a document is cut


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """The positions of each rank: `mask.seq_len` tokens cut over `size` ranks, the first ones a token longer."""
    pool = _Pool(_documents(mask))
    area = pool.work[-1]
    tokens, longer = divmod(mask.seq_len, size)
    done, spans = 0, []
    for number in range(1, size):
        rank = _Rank(tokens + (number <= longer), area * number // size - done, int(area * _SLACK / size))
        _fill(rank, pool)
        done = area * number // size - rank.work
        spans.append(merged(rank.spans))
    rest = [(document.start, document.stop) for document in pool.everything()]
    return [*spans, merged(rest)]


class _Document:
    """What is left of a document: positions start to stop - 1 of the mask."""

    __slots__ = ("density", "seen", "start", "stop", "tokens", "work")

    def __init__(self, start: int, stop: int, seen: Callable[[int], int]):
        self.seen = seen  # the visible pairs of the document's queries before a position
        self.cut_to(start, stop)

    def cut_to(self, start: int, stop: int) -> None:
        self.start, self.stop, self.tokens = start, stop, stop - start
        self.work = self.seen(stop) - self.seen(start)
        self.density = self.work / self.tokens if self.tokens else 0.0

    def peeled(self, tokens: int, early: int) -> int:
        """The work of so many tokens off its ends, of which so many are early ones."""
        start, late = self.start, self.stop - tokens
        return self.work + self.seen(start + early) - self.seen(late + early)

    def reach(self, tokens: int) -> tuple[int, int]:
        """The least and the most work of so many tokens off its ends, for all masks of which one end is the sparser."""
        a, b = self.peeled(tokens, 0), self.peeled(tokens, tokens)
        return (a, b) if a < b else (b, a)

    def fair(self, tokens: int) -> float:
        """The share of its work for so many tokens off its ends, as nearly as these can have it."""
        if tokens >= self.tokens:  # more than it has: as if there were more
            return tokens * self.density
        low, high = self.reach(tokens)
        return min(max(tokens * self.density, low), high)


class _Rank:
    """What a rank still lacks, and the spans it has."""

    def __init__(self, tokens: int, work: int, slack: int):
        self.tokens, self.work = tokens, work
        self.slack = slack  # of work
        self.spans: list[Span] = []

    def take(self, document: _Document) -> None:
        self.spans.append((document.start, document.stop))
        self.tokens -= document.tokens
        self.work -= document.work

    def peel(self, document: _Document, tokens: int, work: float) -> None:
        """Takes so many tokens off the ends of a document, such that they have about so much work."""
        early = _early(document, tokens, work, self.slack)
        start, stop, before = document.start, document.stop, document.work
        self.spans += [(start, start + early), (stop - tokens + early, stop)]
        document.cut_to(start + early, stop - tokens + early)
        self.tokens -= tokens
        self.work -= before - document.work


class _Pool:
    """The documents that no rank has, the sparsest first.

    tokens, work  sums over the first 0, 1, 2, ... documents, all plus what was there before the first one
    cut           the document that the last rank cut, which is not among them
    """

    def __init__(self, documents: list[_Document]):
        self.documents = documents
        self.cut: _Document | None = None
        self._sort()

    def _sort(self) -> None:
        self.documents.sort(key=_order)
        self.tokens = list(accumulate([d.tokens for d in self.documents], initial=0))
        self.work = list(accumulate([d.work for d in self.documents], initial=0))

    def insert(self, document: _Document) -> None:
        self.documents.append(document)
        self._sort()

    def pop(self, index: int) -> _Document:
        document = self.documents.pop(index)
        self.tokens[index + 1 :] = [x - document.tokens for x in self.tokens[index + 2 :]]
        self.work[index + 1 :] = [x - document.work for x in self.work[index + 2 :]]
        return document

    def give_sparsest(self, count: int, rank: _Rank) -> None:
        for document in self.documents[:count]:
            rank.take(document)
        del self.documents[:count], self.tokens[:count], self.work[:count]

    def peel_sparsest(self, tokens: int, rank: _Rank) -> None:
        """Gives a rank so many tokens of the sparsest document, or all of it if it has no more."""
        document = self.documents[0]
        if tokens >= document.tokens:
            self.give_sparsest(1, rank)
        else:
            before = document.work
            rank.peel(document, tokens, tokens * document.density)
            self.tokens[0] += tokens
            self.work[0] += before - document.work

    def everything(self) -> list[_Document]:
        return self.documents if self.cut is None else [*self.documents, self.cut]

    def room(self, rank: _Rank) -> int:
        """How many of the sparsest documents a rank has room for."""
        return bisect_right(self.tokens, self.tokens[0] + rank.tokens) - 1

    def lacking(self, rank: _Rank, count: int) -> tuple[int, int]:
        """The tokens and the work that a rank lacks if it gets so many of the sparsest documents."""
        return rank.tokens + self.tokens[0] - self.tokens[count], rank.work + self.work[0] - self.work[count]

    def sparsest(self, tokens: int) -> float:
        """The work of so many of the sparsest tokens, or of all that there are."""
        stop = self.tokens[0] + tokens
        count = bisect_right(self.tokens, stop) - 1
        work = self.work[count] - self.work[0]
        return (
            work + (stop - self.tokens[count]) * self.documents[count].density if count < len(self.documents) else work
        )

    def densest(self, tokens: int) -> float:
        """The work of so many of the densest tokens, or of all that there are."""
        others = max(self.tokens[-1] - self.tokens[0] - tokens, 0)
        return self.work[-1] - self.work[0] - self.sparsest(others)

    def fits(self, document: _Document, rank: _Rank) -> bool:
        """Whether a rank can have all of it and sparse documents for the tokens that are left."""
        left = rank.tokens - document.tokens
        return left >= 0 and document.work + self.sparsest(left) <= rank.work + rank.slack // 16

    def is_enough(self, document: _Document, rank: _Rank) -> bool:
        """Whether a rank that has all of it can get the work that is left from dense documents."""
        return document.work + self.densest(rank.tokens - document.tokens) >= rank.work - rank.slack


def _order(document: _Document) -> tuple[float, int, int]:
    return document.density, document.tokens, document.start


def _tokens(document: _Document) -> int:
    return document.tokens


def _fill(rank: _Rank, pool: _Pool) -> None:
    """Gives a rank its tokens and its work. A document that it has but a part of is `pool.cut` then."""
    if pool.cut is None and not pool.fits(pool.documents[-1], rank):
        pool.cut = pool.pop(len(pool.documents) - 1)
    if pool.cut is not None:
        document, pool.cut = pool.cut, None
        if pool.fits(document, rank) and pool.is_enough(document, rank):
            rank.take(document)
        elif document.density * rank.tokens >= rank.work - rank.slack:
            _split(document, rank, pool)
            return
        else:  # too sparse to begin with
            pool.insert(document)
    _take_dense(rank, pool)
    if rank.tokens and not (_end_whole(rank, pool) or _end_cutting(rank, pool)):
        _split(pool.pop(len(pool.documents) - 1), rank, pool)


def _take_dense(rank: _Rank, pool: _Pool) -> None:
    """Gives a rank the densest documents that fit, until sparse ones have the work that it lacks."""
    documents, index = pool.documents, len(pool.documents) - 1
    while index >= 0 and rank.work - pool.sparsest(rank.tokens) > rank.slack:
        if not pool.fits(documents[index], rank):
            index = bisect_left(documents, True, 0, index, key=lambda d: not pool.fits(d, rank)) - 1
        if index < 0 or documents[index].density * rank.tokens < rank.work - rank.slack:
            return
        rank.take(pool.pop(index))
        index -= 1


def _end_whole(rank: _Rank, pool: _Pool) -> bool:
    """Gives a rank the sparse documents it has room for, of which it may swap one, if these are just what it lacks."""
    documents, room = pool.documents, pool.room(rank)
    tokens, work = pool.lacking(rank, room)
    if tokens == 0 and abs(work) <= rank.slack:
        pool.give_sparsest(room, rank)
        return True
    for swapped in range(room - 1, max(room - _TRIES, 0) - 1, -1):
        old = documents[swapped]
        index = bisect_left(documents, old.tokens + tokens, room, key=_tokens)
        new = documents[min(index, len(documents) - 1)]
        if new.tokens == old.tokens + tokens and abs(old.work + work - new.work) <= rank.slack:
            rank.take(pool.pop(index))
            pool.pop(swapped)
            pool.give_sparsest(room - 1, rank)
            pool.insert(old)
            return True
    return False


def _end_cutting(rank: _Rank, pool: _Pool) -> bool:
    """Gives a rank sparse documents and a piece of the shortest document that then has the tokens and work it lacks."""
    room, best = pool.room(rank), None
    for tried, given_up in enumerate(_more_and_more(room)):
        if tried > _TRIES and best is not None:
            break
        tokens, work = pool.lacking(rank, room - given_up)
        if tokens and (index := _cuttable(pool, room - given_up, tokens, work, rank.slack)) is not None:
            found = pool.documents[index].tokens, room - given_up, index
            best = found if best is None else min(best, found)
    if best is None:
        return False
    _, count, index = best
    document = pool.pop(index)
    pool.give_sparsest(count, rank)
    _cut(document, rank, pool)
    return True


def _more_and_more(most: int) -> Iterator[int]:
    """0, 1, 2, ..., after some tries in ever longer steps, to `most`."""
    number = 0
    while number < most:
        yield number
        number += 1 if number < _TRIES else number
    yield most


def _cuttable(pool: _Pool, first: int, tokens: int, work: int, slack: int) -> int | None:
    """The first document from there on off whose ends one can peel so many tokens with so much work."""

    def has_as_much(document: _Document) -> bool:
        return document.tokens >= tokens and document.reach(tokens)[1] >= work - slack

    index = bisect_left(pool.documents, True, first, key=has_as_much)
    found = pool.documents[index : index + 1]
    return index if any(has_as_much(d) and d.reach(tokens)[0] <= work + slack for d in found) else None


def _split(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Gives a rank a piece of a long document, about as dense as that is, and sparse documents, as many as need be."""

    def excess(count: int, work_of: Callable[[int], float]) -> float:
        """Of work, if a rank has so many of the sparse documents and the piece is all that it lacks."""
        tokens, work = pool.lacking(rank, count)
        return work_of(tokens) - work

    def linear(tokens: int) -> float:
        return tokens * document.density

    room = pool.room(rank)
    count = max(bisect_left(range(room + 1), True, key=lambda count: excess(count, linear) < 0) - 1, 0)
    whole = [k for k in (count, count + 1) if k <= room and _bends(document, rank, *pool.lacking(rank, k))]
    while not whole and count and excess(count, document.fair) < 0:  # its ends are sparser than it is
        count -= 1
    pool.give_sparsest(min(whole, key=lambda k: abs(excess(k, linear)), default=count), rank)
    if not whole and pool.documents and (tokens := _sparse_share(document, rank, pool.documents[0])):
        pool.peel_sparsest(tokens, rank)
    _cut(document, rank, pool)
    while rank.tokens:  # of a document whose ends are sparse all was not enough
        pool.peel_sparsest(rank.tokens, rank)


def _bends(document: _Document, rank: _Rank, tokens: int, work: int) -> bool:
    """Whether a piece of the document can have so many tokens and so much work and leave a rest like it."""
    if not 0 < tokens < document.tokens:
        return False
    low, high = document.reach(tokens)
    off = abs(work - tokens * document.density)
    return low - rank.slack <= work <= high + rank.slack and off <= max(_BENT * work, rank.slack)


def _sparse_share(document: _Document, rank: _Rank, sparse: _Document) -> int:
    """How many tokens of the sparsest document go with the piece of the long one, so that no work is in excess."""
    least, most = max(rank.tokens - document.tokens, 0), min(rank.tokens, sparse.tokens)
    at_none = document.fair(rank.tokens) - rank.work
    at_most = document.fair(rank.tokens - most) + most * sparse.density - rank.work
    share = round(most * at_none / (at_none - at_most)) if at_none > max(at_most, rank.slack) else 0
    return min(max(share, least), most)


def _cut(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Gives a rank the tokens it lacks off the ends of a document, whose rest is the next rank's."""
    if rank.tokens:
        rank.peel(document, min(rank.tokens, document.tokens), rank.work)
    pool.cut = document if document.tokens else None


def _early(document: _Document, tokens: int, work: float, slack: float) -> int:
    """How many early ones are among `tokens` off its ends that have about so much work, none or all if possible."""
    low, high = ((early, document.peeled(tokens, early) - work) for early in (0, tokens))
    nearest = min((low, high), key=lambda end: abs(end[1]))
    if abs(nearest[1]) <= slack or (low[1] > 0) == (high[1] > 0):
        return nearest[0]
    while high[0] - low[0] > 1 and abs(nearest[1]) > slack / 8:
        share = low[1] / (low[1] - high[1])  # along the line between them, and not too near to either
        step = round((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        early = min(max(low[0] + step, low[0] + 1), high[0] - 1)
        nearest = early, document.peeled(tokens, early) - work
        if (nearest[1] > 0) == (low[1] > 0):
            low = nearest
        else:
            high = nearest
    return nearest[0]


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
        if low == 0 and high is None:
            return lambda i: (i - start) * (i - start + 1) // 2
        if low == 0:
            return lambda i: _ramp(i - start, high)
        if high is not None and low == 1 - high:
            later = _ramp(size - 1, high - 1)
            return lambda i: _ramp(i - start, high) + later - _ramp(stop - i - 1, high - 1)
    return lambda i: sum(Slice((q[0], min(q[1], i)), *rest).area for q, *rest in slices if q[0] < i)


def _ramp(count: int, most: int) -> int:
    """The sum of 1, 2, 3, ... over so many numbers, of which those above `most` count as that."""
    return count * (count + 1) // 2 if count <= most else count * most - most * (most - 1) // 2
