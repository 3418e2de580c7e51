"""Mixtures: the rows of several sources in fixed shares, as --data NAME=PATH:WEIGHT names them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from bmt_burst import Scores
from train.base.wording import counted
from train.data.source import Source

_EPOCH = "epoch/"
_OF_ALL = ("seq_len", "seed", "documents", "bos")  # facts in the identity of each source


@dataclass(frozen=True)
class _Pair:
    """Two sources or pairs. `share` is the share of the first one in both."""

    first: str | _Pair
    second: str | _Pair
    share: Fraction

    def count_first(self, samples: int) -> int:
        """Return how many of the first `samples` samples of this pair are of the first one."""
        part, whole = self.share.numerator, self.share.denominator
        return (2 * samples * part + whole) // (2 * whole)


class Interleaving:
    """The order of samples from sources with positive weights, which are normalised to `shares`.

    The source of sample n follows from the shares and n alone. Two sources with shares p and 1 - p
    are a pair: the first has floor(n p + 1/2) of the first n samples. More sources are a tree of
    pairs, as in a Huffman code, where the two smallest shares become a pair.

    A source is off by less than 2 rows of its n p: parts of a node that is off by e are off by at
    most 1/2 + s e, where s is the part's share in the node, and s <= 2/3 for a part that is a pair.
    """

    def __init__(self, weights: Mapping[str, Fraction]):
        total = sum(weights.values())
        self.shares = {name: weight / total for name, weight in weights.items()}
        self._root = _make_tree(self.shares)

    def locate(self, sample: int) -> tuple[str, int]:
        """Return the source of sample number `sample` of the run, and its number in that source."""
        node = self._root
        while isinstance(node, _Pair):
            before = node.count_first(sample)
            if node.count_first(sample + 1) > before:
                node, sample = node.first, before
            else:
                node, sample = node.second, sample - before
        return node, sample

    def count(self, samples: int) -> dict[str, int]:
        """Return how many of the first `samples` samples each source has."""
        counts, open_nodes = dict.fromkeys(self.shares, 0), [(self._root, samples)]
        while open_nodes:
            node, its = open_nodes.pop()
            if isinstance(node, _Pair):
                first = node.count_first(its)
                open_nodes += [(node.first, first), (node.second, its - first)]
            else:
                counts[node] = its
        return counts


def _make_tree(shares: Mapping[str, Fraction]) -> str | _Pair:
    """Return the tree of pairs. It does not depend on the order of `shares`."""
    heap: list[tuple[Fraction, str, str | _Pair]] = [
        (share, name, name) for name, share in shares.items()
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (small, name, first), (large, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pair = _Pair(first, second, small / (small + large))
        heapq.heappush(heap, (small + large, name, pair))  # names are different
    [(_, _, root)] = heap
    return root


class Mixture(Source):
    """The rows of several sources in the shares of their weights. Each starts over on its own."""

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, Fraction]):
        self.sources, self._weights = dict(sources), dict(weights)
        self.interleaving = Interleaving(weights)
        self._first = first = next(iter(self.sources.values()))
        self.folder, self.vocab_size, self.kind = first.folder, first.vocab_size, first.kind
        self.documents = first.documents

    @property
    def bos_id(self) -> int | None:
        """Raises ValueError if sources have different begin tokens."""
        found = {source.bos_id: name for name, source in self.sources.items()}
        if len(found) > 1:
            one, other = (
                f"{'no begin token' if bos is None else f'begin token {bos}'} in source {name}"
                for bos, name in list(found.items())[:2]
            )
            raise ValueError(f"documents get {one}, but {other}: give --bos TOKEN or --bos none")
        return self._first.bos_id

    @property
    def description(self) -> str:
        parts = []
        for name, source in self.sources.items():
            epoch = f"{counted(source.epoch, 'sequence')} an epoch, " if source.epoch else ""
            share = float(self.interleaving.shares[name])
            parts.append(f"{share:.3%} {name} ({epoch}{source.description})")
        return "a mixture of " + ", ".join(parts)

    @property
    def identity(self) -> dict[str, Any]:
        of_all = self._first.identity
        sources = {}
        for name, source in self.sources.items():
            own = {key: x for key, x in source.identity.items() if key not in _OF_ALL}
            sources[name] = {"share": str(self.interleaving.shares[name]), **own}
        return {"sources": sources, **{key: of_all[key] for key in _OF_ALL if key in of_all}}

    @property
    def example_scores(self) -> Scores | None:
        return self._first.example_scores

    def keep_documents_apart(self, apart: bool, bos: int | None) -> Self:
        kept = {name: part.keep_documents_apart(apart, bos) for name, part in self.sources.items()}
        return type(self)(kept, self._weights)

    def of_sample(self, sample: int) -> Any:
        name, place = self.interleaving.locate(sample)
        return self.sources[name].of_sample(place)

    def number_of(self, sample: int) -> int:
        return list(self.sources).index(self.interleaving.locate(sample)[0])

    def state(self, samples: int) -> dict[str, Any]:
        counts = self.interleaving.count(samples)
        states = {name: part.state(counts[name]) for name, part in self.sources.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: dict[str, Any]) -> None:
        for name, source in self.sources.items():
            source.restore(state.get(name, {}))


def flatten_identities(*identities: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the identities of data with a value for each fact, so that they can be compared. If
    sources differ in their names, only the names are facts of sources.
    """
    names = [", ".join(sorted(x["sources"])) if "sources" in x else None for x in identities]
    if len(set(names)) > 1:
        return tuple(
            {"sources": its or "a single folder", **{k: x[k] for k in _OF_ALL if k in x}}
            for its, x in zip(names, identities, strict=True)
        )
    flat = []
    for identity in identities:
        of_all = dict(identity)
        sources = of_all.pop("sources", {}).items()
        flat.append({f"{k} of {name}": x for name, own in sources for k, x in own.items()} | of_all)
    return tuple(flat)


def parts(data: Source) -> dict[str, Source]:
    """Return the sources of `data` by name: those of a mixture, or `data` with an empty name."""
    return data.sources if isinstance(data, Mixture) else {"": data}


def source_names(data: Source) -> tuple[str, ...]:
    """Return the names of a mixture's sources. Nothing for other data."""
    return tuple(data.sources) if isinstance(data, Mixture) else ()


def starting_over(data: Source, before: int, after: int) -> list[str]:
    """Return a mixture's sources that start over for the first time after `before` samples."""
    earlier, later = epochs(data, before), epochs(data, after)
    return [
        name.removeprefix(_EPOCH) for name, epoch in later.items() if earlier[name] <= 1 < epoch
    ]


def epochs(data: Source, samples: int) -> dict[str, float]:
    """Return how often `samples` samples have read each source of a mixture, as epoch/NAME."""
    if not isinstance(data, Mixture):
        return {}
    counts = data.interleaving.count(samples)
    return {
        _EPOCH + name: counts[name] / source.epoch
        for name, source in data.sources.items()
        if source.epoch
    }
