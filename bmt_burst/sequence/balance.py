"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents are the parts of a mask that see nothing of each other. The work of one is its visible
pairs, its density that work for each token. Short documents are dealt first, as cards are, so that
ranks have nearly as many, of like lengths: kernels take longer for many short documents than for a
few long ones of as many pairs. Some of them are kept.

Then ranks are filled one after the other, each with the tokens and the work that it still lacks:
with the densest documents that fit, and for the tokens that are left with the sparsest. What then
lacks is swapped in, if there are documents of just the right lengths, or peeled off a document: as
many tokens off its start, which see little, and off its end, which see much, as have the work that
lacks. The next rank begins with the rest of that document.

As each rank gets just its share, what is left always has the mean density. So there are always
denser and sparser documents to mix, and the last rank fares as the first. A rank leaves at most two
documents unfinished: the one it peels, and, where that is so dense that it fits no rank, a sparse
one. One causal document becomes the zigzag layout, a window or a full mask nearly the contiguous
one.

Balance is lost where the work is in the middle of documents: a window to both sides not much
shorter than they are.

Plain numbers and no torch, and nothing is left to chance: all ranks and all versions of Python find
the same.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from .mask import Mask, Slice
from .span import Span, merged

# of the mean work of a rank: how far one may be from its share; the next rank makes up for it
_SLACK = 0.005
# of the work of a long document's piece: how far that may be from the document's density
_BENT = 0.2
# ways to make room for a piece of a document, of which the shortest such document is cut
_TRIES = 8
_SWAPS = 64  # documents that a rank may give up for another one, before a document is cut
_SHORT = 4  # a short document is at most such a part of a rank's tokens and of its work
# short documents for each rank that are not dealt; twice as many for each of so many ranks
_KEPT = 8
# the same where one document has half of the work, and every rank a piece of it to make up for
# lengths
_FEW = 4


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """The positions of each rank: `mask.seq_len` tokens cut over `size` ranks, the first ones a
    token longer.
    """
    documents = _documents(mask)
    area, tokens = sum(document.work for document in documents), mask.seq_len
    ranks = [
        _Rank(
            (tokens + rank) // size,
            area * (rank + 1) // size - area * rank // size,
            int(area * _SLACK / size),
        )
        for rank in reversed(range(size))
    ]
    pool = _Pool(_deal(documents, ranks))
    last = ranks[-1]
    for rank, following in itertools.pairwise(ranks):
        if not _fill_like(last, rank, pool):
            _fill(rank, pool)
        following.work += rank.work
        last = rank
    ranks[-1].documents += pool.everything()
    return [rank.spans for rank in ranks]


def _deal(documents: list[_Document], ranks: Sequence[_Rank]) -> list[_Document]:
    """Deals short documents and returns the others.

    The dense ones go first, each to the rank that lacks the most work, then the sparse ones, each
    to the rank that lacks the most tokens. Some of all lengths are kept, to choose from where
    tokens or work must be just right.
    """
    size = len(ranks)
    tokens, work = (sum(amount(document) for document in documents) for amount in (_tokens, _work))
    short, others = [], []
    for document in documents:
        is_short = (
            document.tokens * size * _SHORT <= tokens and document.work * size * _SHORT <= work
        )
        (short if is_short else others).append(document)
    one_for_all = any(document.work * 2 >= work for document in others)
    kept = _FEW * size if one_for_all else _KEPT * (size + min(size, _KEPT))
    if kept >= len(short):
        return documents
    short.sort(key=_order, reverse=True)
    chosen = {len(short) * (2 * i + 1) // (2 * kept) for i in range(kept)}
    others += [short[i] for i in chosen]
    dealt = [document for i, document in enumerate(short) if i not in chosen]
    tokens, work = (sum(amount(document) for document in dealt) for amount in (_tokens, _work))
    sparse = bisect_left(
        dealt, True, key=lambda document: document.work * tokens <= work * document.tokens
    )
    return (
        others + _hand_out(dealt[:sparse], ranks, _work) + _hand_out(dealt[sparse:], ranks, _tokens)
    )


def _hand_out(
    documents: Sequence[_Document],
    ranks: Sequence[_Rank],
    amount: Callable[[_Document | _Rank], int],
) -> list[_Document]:
    """Each to the rank that lacks the most; returns those that did not fit."""
    heap = [(-amount(rank), number) for number, rank in enumerate(ranks)]
    heapify(heap)
    left = []
    for document in documents:
        lacking, number = heap[0]
        if document.tokens > ranks[number].tokens:
            left.append(document)
            continue
        ranks[number].take(document)
        heapreplace(heap, (lacking + amount(document), number))
    return left


class _Document:
    """What is left of a document: positions start to stop - 1 of the mask."""

    __slots__ = ("before", "density", "seen", "start", "stop", "tokens", "until", "work")

    def __init__(self, start: int, stop: int, seen: Callable[[int], int]):
        self.seen = seen  # the visible pairs of the document's queries before a position
        self.cut_to(start, stop)

    def cut_to(self, start: int, stop: int) -> None:
        self.start, self.stop, self.tokens = start, stop, stop - start
        # pairs before its start and its stop
        self.before, self.until = self.seen(start), self.seen(stop)
        self.work = self.until - self.before
        self.density = self.work / self.tokens if self.tokens else 0.0

    def peeled(self, tokens: int, early: int) -> int:
        """The work of so many tokens off its ends, of which so many are early ones."""
        return self.work + self.seen(self.start + early) - self.seen(self.stop - tokens + early)

    def reach(self, tokens: int) -> tuple[int, int]:
        """The least and the most work of so many tokens off its ends, for all masks of which one
        end is the sparser.
        """
        first, last = (
            self.seen(self.start + tokens) - self.before,
            self.until - self.seen(self.stop - tokens),
        )
        return (first, last) if first < last else (last, first)

    def fair(self, tokens: int) -> float:
        """The share of its work for so many tokens off its ends, as nearly as these can have it."""
        if tokens >= self.tokens:  # more than it has: as if there were more
            return tokens * self.density
        low, high = self.reach(tokens)
        share = tokens * self.density
        return low if share < low else high if share > high else share


class _Rank:
    """What a rank still lacks, and the spans it has."""

    def __init__(self, tokens: int, work: int, slack: int):
        self.tokens, self.work = tokens, work
        self.slack = slack  # of work
        self.documents: list[_Document] = []  # that it has whole, or the rest of
        # documents, tokens off their ends, early ones among them
        self.peeled: list[tuple[_Document, int, int]] = []
        self.pieces: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        return merged(
            [*self.pieces, *((document.start, document.stop) for document in self.documents)]
        )

    def take(self, document: _Document) -> None:
        self.documents.append(document)
        self.tokens -= document.tokens
        self.work -= document.work

    def give_back(self, document: _Document) -> None:
        self.documents.remove(document)
        self.tokens += document.tokens
        self.work += document.work

    def peel(self, document: _Document, tokens: int, early: int) -> None:
        """Takes so many tokens off the ends of a document, of which so many are early ones."""
        start, stop, before = document.start, document.stop, document.work
        self.pieces += [(start, start + early), (stop - tokens + early, stop)]
        self.peeled.append((document, tokens, early))
        document.cut_to(start + early, stop - tokens + early)
        self.tokens -= tokens
        self.work -= before - document.work


class _Pool:
    """The documents that no rank has, the sparsest first.

    tokens, work  sums over the first 0, 1, 2, ... documents, all plus what was there before the
                  first one
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
            self.peel(
                document,
                rank,
                tokens,
                _early(document, tokens, tokens * document.density, rank.slack),
            )

    def peel(self, document: _Document, rank: _Rank, tokens: int, early: int) -> None:
        """Gives a rank so many tokens off the ends of the sparsest document or of the one that was
        cut.
        """
        lacked = rank.work
        rank.peel(document, tokens, early)
        if document is not self.cut:
            self.tokens[0] += tokens
            self.work[0] += lacked - rank.work

    def everything(self) -> list[_Document]:
        return self.documents if self.cut is None else [*self.documents, self.cut]

    def room(self, rank: _Rank) -> int:
        """How many of the sparsest documents a rank has room for."""
        return bisect_right(self.tokens, self.tokens[0] + rank.tokens) - 1

    def lacking(self, rank: _Rank, count: int) -> tuple[int, int]:
        """The tokens and the work that a rank lacks if it gets so many of the sparsest documents."""
        return rank.tokens + self.tokens[0] - self.tokens[count], rank.work + self.work[
            0
        ] - self.work[count]

    def sparsest(self, tokens: int) -> float:
        """The work of so many of the sparsest tokens, or of all that there are."""
        stop = self.tokens[0] + tokens
        count = bisect_right(self.tokens, stop) - 1
        work = self.work[count] - self.work[0]
        return (
            work + (stop - self.tokens[count]) * self.documents[count].density
            if count < len(self.documents)
            else work
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


def _tokens(x: _Document | _Rank) -> int:
    return x.tokens


def _work(x: _Document | _Rank) -> int:
    return x.work


def _fill(rank: _Rank, pool: _Pool) -> None:
    """Gives a rank its tokens and its work. A document that it has but a part of is `pool.cut`
    then.
    """
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


def _fill_like(last: _Rank, rank: _Rank, pool: _Pool) -> bool:
    """Cuts the documents that the last rank cut in the same way, if that is what this one lacks."""
    documents = [*pool.documents[:1], pool.cut][-len(last.peeled) :]
    lacking, work = rank.tokens, rank.work
    for cut, (document, tokens, early) in zip(documents, last.peeled, strict=False):
        if document is not cut or document.tokens <= tokens:
            return False
        lacking -= tokens
        work -= document.peeled(tokens, early)
    if lacking or abs(work) > rank.slack or len(documents) < len(last.peeled):
        return False
    for document, tokens, early in last.peeled:
        pool.peel(document, rank, tokens, early)
    return True


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
    """Gives a rank the sparse documents it has room for, of which it may swap one, if these are
    just what it lacks.
    """
    documents, room = pool.documents, pool.room(rank)
    tokens, work = pool.lacking(rank, room)
    if tokens == 0 and abs(work) <= rank.slack:
        pool.give_sparsest(room, rank)
        return True
    if room == len(documents):
        return False
    shortest = documents[room].tokens - tokens
    owned = itertools.chain(reversed(documents[:room]), reversed(rank.documents))
    for old in itertools.islice(
        (document for document in owned if document.tokens >= shortest), _SWAPS
    ):
        index = bisect_left(documents, old.tokens + tokens, room, key=_tokens)
        new = documents[min(index, len(documents) - 1)]
        if new.tokens == old.tokens + tokens and abs(old.work + work - new.work) <= rank.slack:
            rank.take(pool.pop(index))
            pool.give_sparsest(room, rank)
            rank.give_back(old)
            pool.insert(old)
            return True
    return False


def _end_cutting(rank: _Rank, pool: _Pool) -> bool:
    """Gives a rank sparse documents and a piece of the shortest document that then has the tokens
    and work it lacks.
    """
    room, best = pool.room(rank), None
    for tried, given_up in enumerate(_more_and_more(room)):
        if tried > _TRIES and best is not None:
            break
        tokens, work = pool.lacking(rank, room - given_up)
        if (
            tokens
            and (index := _cuttable(pool, room - given_up, tokens, work, rank.slack)) is not None
        ):
            found = pool.documents[index].tokens, room - given_up, index
            best = found if best is None else min(best, found)
    if best is None:
        return False
    _, count, index = best
    document = pool.pop(index)
    pool.give_sparsest(count, rank)
    _cut_document(document, rank, pool)
    return True


def _more_and_more(most: int) -> Iterator[int]:
    """0, 1, 2, ..., after some tries in ever longer steps, to `most`."""
    number = 0
    while number < most:
        yield number
        number += 1 if number < _TRIES else number
    yield most


def _cuttable(pool: _Pool, first: int, tokens: int, work: int, slack: int) -> int | None:
    """The first document from there on off whose ends one can peel so many tokens with so much
    work.
    """

    def has_as_much(document: _Document) -> bool:
        return document.tokens >= tokens and document.reach(tokens)[1] >= work - slack

    index = bisect_left(pool.documents, True, first, key=has_as_much)
    found = pool.documents[index : index + 1]
    return (
        index if any(has_as_much(d) and d.reach(tokens)[0] <= work + slack for d in found) else None
    )


def _split(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Gives a rank a piece of a long document, about as dense as that is, and sparse documents, as
    many as need be.
    """

    def excess(count: int, work_of: Callable[[int], float]) -> float:
        """Of work, if a rank has so many of the sparse documents and the piece is all that it
        lacks.
        """
        tokens, work = pool.lacking(rank, count)
        return work_of(tokens) - work

    def linear(tokens: int) -> float:
        return tokens * document.density

    room = pool.room(rank)
    count = max(
        bisect_left(range(room + 1), True, key=lambda count: excess(count, linear) < 0) - 1, 0
    )
    whole = [
        k
        for k in (count, count + 1)
        if k <= room and _bends(document, rank, *pool.lacking(rank, k))
    ]
    # its ends are sparser than it is
    while not whole and count and excess(count, document.fair) < 0:
        count -= 1
    pool.give_sparsest(min(whole, key=lambda k: abs(excess(k, linear)), default=count), rank)
    if (
        not whole
        and pool.documents
        and (tokens := _sparse_share(document, rank, pool.documents[0]))
    ):
        pool.peel_sparsest(tokens, rank)
    _cut_document(document, rank, pool)
    while rank.tokens:  # of a document whose ends are sparse all was not enough
        pool.peel_sparsest(rank.tokens, rank)


def _bends(document: _Document, rank: _Rank, tokens: int, work: int) -> bool:
    """Whether a piece of the document can have so many tokens and so much work and leave a rest
    like it.
    """
    if not 0 < tokens < document.tokens:
        return False
    low, high = document.reach(tokens)
    off = abs(work - tokens * document.density)
    return low - rank.slack <= work <= high + rank.slack and off <= max(_BENT * work, rank.slack)


def _sparse_share(document: _Document, rank: _Rank, sparse: _Document) -> int:
    """How many tokens of the sparsest document go with the piece of the long one, so that no work
    is in excess.
    """
    least, most = max(rank.tokens - document.tokens, 0), min(rank.tokens, sparse.tokens)
    at_none = document.fair(rank.tokens) - rank.work
    at_most = document.fair(rank.tokens - most) + most * sparse.density - rank.work
    share = round(most * at_none / (at_none - at_most)) if at_none > max(at_most, rank.slack) else 0
    return min(max(share, least), most)


def _cut_document(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Gives a rank the tokens it lacks off the ends of a document, whose rest is the next rank's."""
    if rank.tokens:
        tokens = min(rank.tokens, document.tokens)
        rank.peel(document, tokens, _early(document, tokens, rank.work, rank.slack))
    pool.cut = document if document.tokens else None


def _early(document: _Document, tokens: int, work: float, slack: float) -> int:
    """How many early ones are among `tokens` off its ends that have about so much work, none or all
    if possible.
    """
    low = 0, document.until - document.seen(document.stop - tokens) - work
    high = tokens, document.seen(document.start + tokens) - document.before - work
    nearest = low if abs(low[1]) <= abs(high[1]) else high
    if abs(nearest[1]) <= slack or (low[1] > 0) == (high[1] > 0):
        return nearest[0]
    while high[0] - low[0] > 1 and abs(nearest[1]) > slack / 8:
        # along the line between them, and not too near to either
        share = low[1] / (low[1] - high[1])
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
    return [
        _Document(*span, _seen(*span, found)) for span, found in zip(parts, slices, strict=True)
    ]


def _seen(start: int, stop: int, slices: Sequence[Slice]) -> Callable[[int], int]:
    """The visible pairs of a part's queries before a position, as a function of it: in closed form
    if it is simple.
    """
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
