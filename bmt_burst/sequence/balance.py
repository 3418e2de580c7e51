"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents are `Mask.parts`. The work of a document is its number of visible pairs. Its density is
its work divided by its tokens.

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
section "How evenly layouts share out work" of docs/results-masks.md has the measured gap to equal
work. The gap is larger where the work is in the middle of documents: for a window to both sides
that is not much shorter than they are.

This module uses plain numbers and nothing random: all ranks and all versions of Python find the
same layout.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from .documents import Document, find_documents
from .mask import Mask
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

_tokens_of = operator.attrgetter("tokens")  # of a document or a rank
_work_of = operator.attrgetter("work")
_sort_key = operator.attrgetter("density", "tokens", "start")


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """Return the positions of each of `size` ranks. The first ranks may have a token more."""
    documents = find_documents(mask)
    tokens, work = _sum_up(documents)
    ranks = [
        _Rank(
            (tokens + rank) // size,
            work * (rank + 1) // size - work * rank // size,
            int(work * _SLACK / size),
        )
        for rank in reversed(range(size))
    ]
    pool = _Pool(_deal_documents(documents, ranks))
    for rank, following in itertools.pairwise(ranks):
        _fill_rank(rank, pool)
        following.work += rank.work
    ranks[-1].documents += pool.documents if pool.cut is None else [*pool.documents, pool.cut]
    return [
        merged([*rank.pieces, *((document.start, document.stop) for document in rank.documents)])
        for rank in ranks
    ]


def _sum_up(documents: Sequence[Document]) -> tuple[int, int]:
    """Return the tokens and the work of all documents."""
    return sum(map(_tokens_of, documents)), sum(map(_work_of, documents))


def _deal_documents(documents: list[Document], ranks: Sequence[_Rank]) -> list[Document]:
    """Deal short documents to the ranks, and return the others.

    Each dense document goes to the rank that lacks the most work, and then each thin one to the
    rank that lacks the most tokens. Some of all lengths are kept, to match tokens or work exactly
    later.
    """
    size = len(ranks)
    tokens, work = _sum_up(documents)
    most_tokens, most_work = tokens // (size * _SHORT), work // (size * _SHORT)
    short: list[Document] = []
    others: list[Document] = []
    for document in documents:
        is_short = document.tokens <= most_tokens and document.work <= most_work
        (short if is_short else others).append(document)
    one_for_all = any(document.work * 2 >= work for document in others)
    kept = _KEPT_BESIDE_LONG * size if one_for_all else _KEPT * (size + min(size, _KEPT))
    if kept >= len(short):
        return documents
    short.sort(key=_sort_key, reverse=True)
    chosen = {len(short) * (2 * i + 1) // (2 * kept) for i in range(kept)}
    others += [short[i] for i in chosen]
    dealt = [document for i, document in enumerate(short) if i not in chosen]
    tokens, work = _sum_up(dealt)
    thin = bisect_left(dealt, True, key=lambda d: d.work * tokens <= work * d.tokens)
    others += _hand_out(dealt[:thin], ranks, _work_of)
    return others + _hand_out(dealt[thin:], ranks, _tokens_of)


def _hand_out(
    documents: Sequence[Document],
    ranks: Sequence[_Rank],
    amount: Callable[[Document | _Rank], int],
) -> list[Document]:
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


class _Rank:
    """A rank: the tokens and the work that it still lacks, and the spans that it has."""

    def __init__(self, tokens: int, work: int, slack: int):
        self.tokens, self.work = tokens, work
        self.slack = slack  # of work
        self.documents: list[Document] = []  # that it has whole, or the rest of
        self.pieces: list[Span] = []  # of other documents

    def take(self, document: Document) -> None:
        self.documents.append(document)
        self.tokens -= document.tokens
        self.work -= document.work

    def give_back(self, document: Document) -> None:
        self.documents.remove(document)
        self.tokens += document.tokens
        self.work += document.work

    def peel(self, document: Document, tokens: int, work: float) -> None:
        """Take `tokens` off the ends of a document, with about this work."""
        early = document.count_early(tokens, work, self.slack)
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

    def __init__(self, documents: list[Document]):
        self.documents = documents
        self.cut: Document | None = None
        self._sort()

    def _sort(self) -> None:
        self.documents.sort(key=_sort_key)
        self.tokens = list(accumulate([d.tokens for d in self.documents], initial=0))
        self.work = list(accumulate([d.work for d in self.documents], initial=0))

    def insert(self, document: Document) -> None:
        self.documents.append(document)
        self._sort()

    def pop(self, index: int) -> Document:
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
        document, lacked = self.documents[0], rank.work
        if tokens >= document.tokens:
            self.give_thinnest(1, rank)
            return
        rank.peel(document, tokens, document.share(tokens))
        self.tokens[0] += tokens
        self.work[0] += lacked - rank.work

    def room(self, rank: _Rank) -> int:
        """Count the thinnest documents that a rank has room for."""
        return bisect_right(self.tokens, self.tokens[0] + rank.tokens) - 1

    def lacking(self, rank: _Rank, count: int) -> tuple[int, int]:
        """Return the tokens and the work that a rank lacks after the `count` thinnest documents."""
        tokens, work = self.tokens[count] - self.tokens[0], self.work[count] - self.work[0]
        return rank.tokens - tokens, rank.work - work

    def thinnest(self, tokens: int) -> float:
        """Return the work of the `tokens` thinnest tokens, or of all if there are fewer."""
        stop = self.tokens[0] + tokens
        count = bisect_right(self.tokens, stop) - 1
        work = self.work[count] - self.work[0]
        if count == len(self.documents):
            return work
        return work + self.documents[count].share(stop - self.tokens[count])

    def fits(self, document: Document, rank: _Rank) -> bool:
        """Whether a rank can have all of it and thin documents for the tokens that are left."""
        left = rank.tokens - document.tokens
        return left >= 0 and document.work + self.thinnest(left) <= rank.work + rank.slack // 16

    def is_enough(self, document: Document, rank: _Rank) -> bool:
        """Whether a rank that has all of it can get the work that is left from dense documents."""
        others = max(self.tokens[-1] - self.tokens[0] - (rank.tokens - document.tokens), 0)
        densest = self.work[-1] - self.work[0] - self.thinnest(others)
        return document.work + densest >= rank.work - rank.slack


def _fill_rank(rank: _Rank, pool: _Pool) -> None:
    """Give a rank its tokens and its work. If it gets a part of a document, that is `pool.cut`."""
    document, pool.cut = pool.cut, None
    if document is None and not pool.fits(pool.documents[-1], rank):
        document = pool.pop(len(pool.documents) - 1)
    if document is not None:
        if pool.fits(document, rank) and pool.is_enough(document, rank):
            rank.take(document)
        elif document.share(rank.tokens) >= rank.work - rank.slack:
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
        if index < 0 or documents[index].share(rank.tokens) < rank.work - rank.slack:
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
    long_enough = (document for document in owned if document.tokens >= shortest)
    for old in itertools.islice(long_enough, _SWAPS):
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

    def has_as_much(document: Document) -> bool:
        return document.tokens >= tokens and document.reach(tokens)[1] >= work - slack

    index = bisect_left(pool.documents, True, first, key=has_as_much)
    if index == len(pool.documents) or pool.documents[index].reach(tokens)[0] > work + slack:
        return None
    return index


def _split_document(document: Document, rank: _Rank, pool: _Pool) -> None:
    """Give a rank a piece of a long document, about as dense as that is, and thin documents."""

    def excess(count: int, work_of: Callable[[int], float]) -> float:
        """Return the excess work if a rank gets `count` thin documents and a piece."""
        tokens, work = pool.lacking(rank, count)
        return work_of(tokens) - work

    room = pool.room(rank)
    count = bisect_left(range(room + 1), True, key=lambda count: excess(count, document.share) < 0)
    count = max(count - 1, 0)
    whole = [
        k
        for k in (count, count + 1)
        if k <= room and _leaves_similar_rest(document, rank, *pool.lacking(rank, k))
    ]
    # its ends are thinner than it is
    while not whole and count and excess(count, document.fair) < 0:
        count -= 1
    pool.give_thinnest(
        min(whole, key=lambda k: abs(excess(k, document.share)), default=count), rank
    )
    if not whole and pool.documents and (tokens := _thin_share(document, rank, pool.documents[0])):
        pool.peel_thinnest(tokens, rank)
    _cut_document(document, rank, pool)
    while rank.tokens:  # all of a document with thin ends was not enough
        pool.peel_thinnest(rank.tokens, rank)


def _leaves_similar_rest(document: Document, rank: _Rank, tokens: int, work: int) -> bool:
    """Whether a piece can have these tokens and this work and leave a rest of similar density."""
    if not 0 < tokens < document.tokens:
        return False
    low, high = document.reach(tokens)
    off = abs(work - document.share(tokens))
    return low - rank.slack <= work <= high + rank.slack and off <= max(
        _MOST_DEVIATION * work, rank.slack
    )


def _thin_share(document: Document, rank: _Rank, thin: Document) -> int:
    """Count the tokens of the thinnest document that a rank needs next to a piece of the long
    one, so that it has no excess work.
    """
    least, most = max(rank.tokens - document.tokens, 0), min(rank.tokens, thin.tokens)
    at_none = document.fair(rank.tokens) - rank.work
    at_most = document.fair(rank.tokens - most) + thin.share(most) - rank.work
    share = round(most * at_none / (at_none - at_most)) if at_none > max(at_most, rank.slack) else 0
    return min(max(share, least), most)


def _cut_document(document: Document, rank: _Rank, pool: _Pool) -> None:
    """Give a rank the tokens it lacks off the ends of a document, and the next rank the rest."""
    if rank.tokens:
        rank.peel(document, min(rank.tokens, document.tokens), rank.work)
    pool.cut = document if document.tokens else None
