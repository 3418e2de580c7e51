"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents are the parts of a mask that see nothing of each other. The work of a document is its
number of visible pairs. Its density is its work divided by its tokens.

1. Deal short documents to the ranks, like cards, so that ranks have nearly equal numbers of them,
   of similar lengths. (Kernels take longer for many short documents than for a few long ones with
   as many pairs.) Keep some of them for step 2.
2. Fill the ranks one after the other, each with the tokens and the work that it still lacks. Take
   the densest documents that fit, and then the thinnest ones for the tokens that are left. Make up
   the rest by swapping documents of just the right lengths, or by peeling a document: tokens off
   its start, which see little, and off its end, which see much. The next rank begins with the rest
   of the peeled document.

Each rank gets exactly its share, so the remaining documents always have the mean density. They
always include denser and thinner ones to mix, and the last rank is as balanced as the first. A rank
leaves at most two documents unfinished: the peeled one, and a thin one if the peeled one is so
dense that it fits no rank. One causal document becomes the zigzag layout, nearly, and a window or a
full mask the contiguous one.

Step 1 is Graham's list scheduling, the densest documents first (LPT takes the longest first). Step
2 is a greedy fill of one rank after the other, like next-fit, in which a document may be cut. The
ideal is equal work on all ranks: 0 %. The section "How evenly layouts share out work" of
docs/results-masks.md has the measured gap to it, next to that of other layouts and of the best
assignment of chunks.

Balance is worse where the work is in the middle of documents: for a window to both sides that is
not much shorter than they are.

This module uses plain numbers, no torch, and nothing random: all ranks and all versions of Python
find the same layout.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from .mask import Mask, Slice
from .span import Span, merged

# How far the work of a rank may be from its share, relative to the mean work of a rank. The next
# rank makes up for it. A smaller value cuts more documents, a larger one unbalances the ranks.
_SLACK = 0.005
# How far the work of a piece of a long document may be from the mean of as many of its tokens,
# relative to the work of the piece. A larger value leaves a rest much denser or thinner than the
# document was.
_MOST_DEVIATION = 0.2
# How many of its documents a rank tries to swap before it cuts one. It bounds the time.
_SWAPS = 64
# A short document has at most 1 / _SHORT of a rank's mean tokens and of its mean work.
_SHORT = 4
# How many short documents for each rank are not dealt but kept for step 2; for each of the first
# _KEPT ranks, twice as many.
_KEPT = 8
# The same if one document has half of the work. Each rank then gets a piece of that document, which
# can have any length.
_KEPT_BESIDE_LONG = 4


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """Return the positions of each of `size` ranks. The first ranks may have a token more."""
    documents = _find_documents(mask)
    area, tokens = sum(document.work for document in documents), mask.seq_len
    ranks = [
        _Rank(
            (tokens + rank) // size,
            area * (rank + 1) // size - area * rank // size,
            int(area * _SLACK / size),
        )
        for rank in reversed(range(size))
    ]
    pool = _Pool(_deal_documents(documents, ranks))
    for rank, following in itertools.pairwise(ranks):
        _fill_rank(rank, pool)
        following.work += rank.work
    ranks[-1].documents += pool.everything()
    return [rank.spans for rank in ranks]


def _deal_documents(documents: list[_Document], ranks: Sequence[_Rank]) -> list[_Document]:
    """Deal short documents to the ranks, and return the others.

    Each dense document goes to the rank that lacks the most work, and then each thin one to the
    rank that lacks the most tokens. Some of all lengths are kept, to match tokens or work exactly
    later.
    """
    size = len(ranks)
    tokens, work = (
        sum(amount(document) for document in documents) for amount in (_tokens_of, _work_of)
    )
    short: list[_Document] = []
    others: list[_Document] = []
    for document in documents:
        is_short = (
            document.tokens * size * _SHORT <= tokens and document.work * size * _SHORT <= work
        )
        (short if is_short else others).append(document)
    one_for_all = any(document.work * 2 >= work for document in others)
    kept = _KEPT_BESIDE_LONG * size if one_for_all else _KEPT * (size + min(size, _KEPT))
    if kept >= len(short):
        return documents
    short.sort(key=_sort_key, reverse=True)
    chosen = {len(short) * (2 * i + 1) // (2 * kept) for i in range(kept)}
    others += [short[i] for i in chosen]
    dealt = [document for i, document in enumerate(short) if i not in chosen]
    tokens, work = (
        sum(amount(document) for document in dealt) for amount in (_tokens_of, _work_of)
    )
    thin = bisect_left(
        dealt, True, key=lambda document: document.work * tokens <= work * document.tokens
    )
    return (
        others
        + _hand_out(dealt[:thin], ranks, _work_of)
        + _hand_out(dealt[thin:], ranks, _tokens_of)
    )


def _hand_out(
    documents: Sequence[_Document],
    ranks: Sequence[_Rank],
    amount: Callable[[_Document | _Rank], int],
) -> list[_Document]:
    """Give each document to the rank that lacks the most, and return those that did not fit."""
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
    """The rest of a document: positions start to stop - 1 of the mask."""

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
        """Return the work of `tokens` off its ends, `early` of them off its start."""
        return self.work + self.seen(self.start + early) - self.seen(self.stop - tokens + early)

    def reach(self, tokens: int) -> tuple[int, int]:
        """Return the least and the most work of `tokens` tokens off its ends.

        This is right for documents that are thinner at one end.
        """
        first, last = (
            self.seen(self.start + tokens) - self.before,
            self.until - self.seen(self.stop - tokens),
        )
        return (first, last) if first < last else (last, first)

    def fair(self, tokens: int) -> float:
        """Return its mean work of `tokens` tokens, or the nearest that tokens off its ends have."""
        if tokens >= self.tokens:  # more than it has: as if there were more
            return tokens * self.density
        low, high = self.reach(tokens)
        share = tokens * self.density
        return low if share < low else high if share > high else share


class _Rank:
    """A rank: the tokens and the work that it still lacks, and the spans that it has."""

    def __init__(self, tokens: int, work: int, slack: int):
        self.tokens, self.work = tokens, work
        self.slack = slack  # of work
        self.documents: list[_Document] = []  # that it has whole, or the rest of
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
        """Take `tokens` off the ends of a document, `early` of them off its start."""
        start, stop, before = document.start, document.stop, document.work
        self.pieces += [(start, start + early), (stop - tokens + early, stop)]
        document.cut_to(start + early, stop - tokens + early)
        self.tokens -= tokens
        self.work -= before - document.work


class _Pool:
    """The documents that no rank has, the thinnest first.

    tokens, work  sums over the first 0, 1, 2, ... documents, all plus what was there before the
                  first one
    cut           the document that the last rank cut, which is not among them
    """

    def __init__(self, documents: list[_Document]):
        self.documents = documents
        self.cut: _Document | None = None
        self._sort()

    def _sort(self) -> None:
        self.documents.sort(key=_sort_key)
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

    def give_thinnest(self, count: int, rank: _Rank) -> None:
        for document in self.documents[:count]:
            rank.take(document)
        del self.documents[:count], self.tokens[:count], self.work[:count]

    def peel_thinnest(self, tokens: int, rank: _Rank) -> None:
        """Give a rank `tokens` tokens of the thinnest document, or all of it if it has no more."""
        document = self.documents[0]
        if tokens >= document.tokens:
            self.give_thinnest(1, rank)
        else:
            self.peel(
                document,
                rank,
                tokens,
                _count_early(document, tokens, tokens * document.density, rank.slack),
            )

    def peel(self, document: _Document, rank: _Rank, tokens: int, early: int) -> None:
        """Give a rank tokens off the ends of the thinnest document, or of the one that was cut."""
        lacked = rank.work
        rank.peel(document, tokens, early)
        if document is not self.cut:
            self.tokens[0] += tokens
            self.work[0] += lacked - rank.work

    def everything(self) -> list[_Document]:
        return self.documents if self.cut is None else [*self.documents, self.cut]

    def room(self, rank: _Rank) -> int:
        """Count the thinnest documents that a rank has room for."""
        return bisect_right(self.tokens, self.tokens[0] + rank.tokens) - 1

    def lacking(self, rank: _Rank, count: int) -> tuple[int, int]:
        """Return the tokens and the work that a rank lacks after the `count` thinnest documents."""
        return rank.tokens + self.tokens[0] - self.tokens[count], rank.work + self.work[
            0
        ] - self.work[count]

    def thinnest(self, tokens: int) -> float:
        """Return the work of the `tokens` thinnest tokens, or of all if there are fewer."""
        stop = self.tokens[0] + tokens
        count = bisect_right(self.tokens, stop) - 1
        work = self.work[count] - self.work[0]
        return (
            work + (stop - self.tokens[count]) * self.documents[count].density
            if count < len(self.documents)
            else work
        )

    def densest(self, tokens: int) -> float:
        """Return the work of the `tokens` densest tokens, or of all if there are fewer."""
        others = max(self.tokens[-1] - self.tokens[0] - tokens, 0)
        return self.work[-1] - self.work[0] - self.thinnest(others)

    def fits(self, document: _Document, rank: _Rank) -> bool:
        """Whether a rank can have all of it and thin documents for the tokens that are left."""
        left = rank.tokens - document.tokens
        return left >= 0 and document.work + self.thinnest(left) <= rank.work + rank.slack // 16

    def is_enough(self, document: _Document, rank: _Rank) -> bool:
        """Whether a rank that has all of it can get the work that is left from dense documents."""
        return document.work + self.densest(rank.tokens - document.tokens) >= rank.work - rank.slack


def _sort_key(document: _Document) -> tuple[float, int, int]:
    return document.density, document.tokens, document.start


def _tokens_of(x: _Document | _Rank) -> int:
    return x.tokens


def _work_of(x: _Document | _Rank) -> int:
    return x.work


def _fill_rank(rank: _Rank, pool: _Pool) -> None:
    """Give a rank its tokens and its work. If it gets a part of a document, that is `pool.cut`."""
    if pool.cut is None and not pool.fits(pool.documents[-1], rank):
        pool.cut = pool.pop(len(pool.documents) - 1)
    if pool.cut is not None:
        document, pool.cut = pool.cut, None
        if pool.fits(document, rank) and pool.is_enough(document, rank):
            rank.take(document)
        elif document.density * rank.tokens >= rank.work - rank.slack:
            _split_document(document, rank, pool)
            return
        else:  # too thin to begin with
            pool.insert(document)
    _take_dense(rank, pool)
    if rank.tokens and not (_end_whole(rank, pool) or _end_cutting(rank, pool)):
        _split_document(pool.pop(len(pool.documents) - 1), rank, pool)


def _take_dense(rank: _Rank, pool: _Pool) -> None:
    """Give a rank the densest documents that fit, until thin ones have the work it lacks."""
    documents, index = pool.documents, len(pool.documents) - 1
    while index >= 0 and rank.work - pool.thinnest(rank.tokens) > rank.slack:
        if not pool.fits(documents[index], rank):
            index = bisect_left(documents, True, 0, index, key=lambda d: not pool.fits(d, rank)) - 1
        if index < 0 or documents[index].density * rank.tokens < rank.work - rank.slack:
            return
        rank.take(pool.pop(index))
        index -= 1


def _end_whole(rank: _Rank, pool: _Pool) -> bool:
    """Give a rank the thin documents that it has room for, if that is just what it lacks.

    One document may be swapped for another one to make it so.
    """
    documents, room = pool.documents, pool.room(rank)
    tokens, work = pool.lacking(rank, room)
    if tokens == 0 and abs(work) <= rank.slack:
        pool.give_thinnest(room, rank)
        return True
    if room == len(documents):
        return False
    shortest = documents[room].tokens - tokens
    owned = itertools.chain(reversed(documents[:room]), reversed(rank.documents))
    for old in itertools.islice(
        (document for document in owned if document.tokens >= shortest), _SWAPS
    ):
        index = bisect_left(documents, old.tokens + tokens, room, key=_tokens_of)
        new = documents[min(index, len(documents) - 1)]
        if new.tokens == old.tokens + tokens and abs(old.work + work - new.work) <= rank.slack:
            rank.take(pool.pop(index))
            pool.give_thinnest(room, rank)
            rank.give_back(old)
            pool.insert(old)
            return True
    return False


def _end_cutting(rank: _Rank, pool: _Pool) -> bool:
    """Give a rank thin documents and a piece of another one, with just what it then lacks.

    It gets as many thin documents as it has room for, or 1, 2, 4, ... fewer.
    """
    room, fewer = pool.room(rank), 0
    while True:
        count = max(room - fewer, 0)
        tokens, work = pool.lacking(rank, count)
        index = _find_cuttable(pool, count, tokens, work, rank.slack) if tokens else None
        if index is not None:
            document = pool.pop(index)
            pool.give_thinnest(count, rank)
            _cut_document(document, rank, pool)
            return True
        if not count:
            return False
        fewer = max(2 * fewer, 1)


def _find_cuttable(pool: _Pool, first: int, tokens: int, work: int, slack: int) -> int | None:
    """Find the first document that has a piece of `tokens` and `work` at its ends."""

    def has_as_much(document: _Document) -> bool:
        return document.tokens >= tokens and document.reach(tokens)[1] >= work - slack

    index = bisect_left(pool.documents, True, first, key=has_as_much)
    found = pool.documents[index : index + 1]
    return (
        index if any(has_as_much(d) and d.reach(tokens)[0] <= work + slack for d in found) else None
    )


def _split_document(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Give a rank a piece of a long document, about as dense as that is, and thin documents."""

    def excess(count: int, work_of: Callable[[int], float]) -> float:
        """Return the excess work if a rank gets `count` thin documents and a piece."""
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
        if k <= room and _leaves_similar_rest(document, rank, *pool.lacking(rank, k))
    ]
    # its ends are thinner than it is
    while not whole and count and excess(count, document.fair) < 0:
        count -= 1
    pool.give_thinnest(min(whole, key=lambda k: abs(excess(k, linear)), default=count), rank)
    if not whole and pool.documents and (tokens := _thin_share(document, rank, pool.documents[0])):
        pool.peel_thinnest(tokens, rank)
    _cut_document(document, rank, pool)
    while rank.tokens:  # all of a document with thin ends was not enough
        pool.peel_thinnest(rank.tokens, rank)


def _leaves_similar_rest(document: _Document, rank: _Rank, tokens: int, work: int) -> bool:
    """Whether a piece can have these tokens and this work and leave a rest of similar density."""
    if not 0 < tokens < document.tokens:
        return False
    low, high = document.reach(tokens)
    off = abs(work - tokens * document.density)
    return low - rank.slack <= work <= high + rank.slack and off <= max(
        _MOST_DEVIATION * work, rank.slack
    )


def _thin_share(document: _Document, rank: _Rank, thin: _Document) -> int:
    """Count the tokens of the thinnest document that a rank needs next to a piece of the long
    one, so that it has no excess work.

    """
    least, most = max(rank.tokens - document.tokens, 0), min(rank.tokens, thin.tokens)
    at_none = document.fair(rank.tokens) - rank.work
    at_most = document.fair(rank.tokens - most) + most * thin.density - rank.work
    share = round(most * at_none / (at_none - at_most)) if at_none > max(at_most, rank.slack) else 0
    return min(max(share, least), most)


def _cut_document(document: _Document, rank: _Rank, pool: _Pool) -> None:
    """Give a rank the tokens it lacks off the ends of a document, and the next rank the rest."""
    if rank.tokens:
        tokens = min(rank.tokens, document.tokens)
        rank.peel(document, tokens, _count_early(document, tokens, rank.work, rank.slack))
    pool.cut = document if document.tokens else None


def _count_early(document: _Document, tokens: int, work: float, slack: float) -> int:
    """Return how many of `tokens` to take off the start of a document, so that they have `work`.

    It is none or all if possible. The others are taken off its end.
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


def _find_documents(mask: Mask) -> list[_Document]:
    """Return the parts of the mask."""
    parts = mask.parts
    slices: list[list[Slice]] = [[] for _ in parts]
    starts = [start for start, _ in parts]
    for s in mask.slices:
        slices[bisect_right(starts, s.q[0]) - 1].append(s)
    return [
        _Document(*span, _pair_counter(*span, found))
        for span, found in zip(parts, slices, strict=True)
    ]


def _pair_counter(start: int, stop: int, slices: Sequence[Slice]) -> Callable[[int], int]:
    """Return a function that counts the visible pairs of a part's queries before a position.

    Simple parts have a closed form.
    """
    size = stop - start
    if len(slices) == 1 and slices[0].q == slices[0].kv == (start, stop):
        _, _, low, high = slices[0]
        if low is None and high is None:
            return lambda i: (i - start) * size
        if low == 0:
            most = size if high is None else high
            return lambda i: _sum_ramp(i - start, most)
        if high is not None and low == 1 - high:
            most, behind = high, high - 1
            later = _sum_ramp(size - 1, behind)
            return lambda i: _sum_ramp(i - start, most) + later - _sum_ramp(stop - i - 1, behind)

    def pairs_before(i: int) -> int:
        before = (s._replace(q=(s.q[0], min(s.q[1], i))) for s in slices if s.q[0] < i)
        return sum(s.area for s in before)

    return pairs_before


def _sum_ramp(count: int, most: int) -> int:
    """Return the sum of min(i, most) for i from 1 to `count`."""
    return count * (count + 1) // 2 if count <= most else count * most - most * (most - 1) // 2
