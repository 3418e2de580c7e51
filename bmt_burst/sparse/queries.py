"""The queries that choose their blocks, and those that need not.

A query that sees at most `most_blocks` blocks takes them all. These are the first `exact_tokens` of
each document. A dense kernel computes them, and only later queries choose and have a far part.

Letters: S tokens of a rank, F queries that choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.documents import documents
from ..sequence.mask import Mask
from ..sequence.span import Span, length
from .config import Constants


class ChoosingDocument(NamedTuple):
    """A document with queries that choose.

    span     its tokens in the sequence
    queries  those that choose, as a span of the queries of all documents
    strides  its whole strides of keys, as a span of those of all documents
    """

    span: Span
    queries: Span
    strides: Span


@dataclass(frozen=True)
class Choosers:
    """The queries that choose.

    tokens     (F,) int64, rising: which of some tokens they are
    places     (F,) int64: their places in their documents
    documents  those documents, in order. Each begins at a stride whose number is a multiple of 4,
               as strides of normalizing keys do.
    """

    tokens: Tensor
    places: Tensor
    documents: tuple[ChoosingDocument, ...]
    # what kernels keep for these queries
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of_document(places: Tensor, strides: int) -> Choosers:
        """Return queries at rising places (F,) of a document that has so many strides of keys."""
        tokens = torch.arange(len(places))
        whole = ChoosingDocument((0, int(places[-1]) + 1), (0, len(places)), (0, strides))
        return Choosers(tokens, places, (whole,))

    @staticmethod
    def of_tokens(positions: Tensor, mask: Mask, sparse: Constants) -> Choosers:
        """Return those among tokens at rising positions (S,) of the keys."""
        spans = [span for span in documents(mask) if length(span) > sparse.exact_tokens]
        later = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
        later[:, 0] += sparse.exact_tokens
        tokens, places, found = [positions[:0]], [positions[:0]], list[ChoosingDocument]()
        count = strides = 0
        for span, (a, b) in zip(spans, torch.searchsorted(positions, later).tolist(), strict=True):
            if a < b:
                whole = length(span) // sparse.kernel_stride
                queries, keys = (count, count + b - a), (strides, strides + whole)
                found.append(ChoosingDocument(span, queries, keys))
                tokens.append(torch.arange(a, b))
                places.append(positions[a:b] - span[0])
                count, strides = count + b - a, strides + -(-whole // 4) * 4
        return Choosers(torch.cat(tokens), torch.cat(places), tuple(found))

    def starts(self) -> Tensor:
        """Return where the document of each query starts in the sequence: (F,) int64."""
        starts = torch.tensor([x.span[0] for x in self.documents], dtype=torch.int64)
        counts = torch.tensor([length(x.queries) for x in self.documents], dtype=torch.int64)
        return starts.repeat_interleave(counts)

    def strides(self, stride: int) -> Tensor:
        """Return the first tokens of the strides of all documents in the sequence, rising: int64.

        The last stride of a document is repeated up to the first of the next.
        """
        found = [torch.arange(0)]
        for (start, _), _, (first, last) in self.documents:
            nth = torch.arange(-(-(last - first) // 4) * 4).clamp_max(last - first - 1)
            found.append(start + stride * nth)
        return torch.cat(found)
