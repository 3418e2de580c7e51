"""Routes: which tokens go to whom for each group of blocks, and where in the receiver's memory they land.

Blocks arrive in groups. The tokens of a group that a rank looks at land one after the other, and what looks at them
alike is one kernel call. Gradients of a group's blocks go home the same way: at home they land one sender's after the
other. Both ends of a message compute its place from the same data, so a transport may write it there without asking.

Pure functions of layout and schedule, no tensors. Try `print(*Routes(Layout("zigzag", 96, 4), Schedule(4), True, "kv",
2).rounds(1)[0], sep="\n")`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from .layout import Layout, Tile
from .merge import Span, length
from .schedule import Schedule, Step


@dataclass(frozen=True)
class Piece:
    """The part of a group that came from one block: its tile, and where its tokens lie in the group."""

    step: Step
    tile: Tile
    at: Span


@dataclass(frozen=True)
class Outgoing:
    """Tokens `span` of what the sender has, for place `peer` of its ring, where `total` tokens land in all.

    They land from token `at` on.
    """

    peer: int
    span: Span
    at: int
    total: int


@dataclass(frozen=True)
class Incoming:
    """Tokens from place `peer` of the ring that land at tokens `at`; they are tokens `span` of the receiver's root."""

    peer: int
    span: Span
    at: Span


@dataclass(frozen=True)
class Group:
    """The blocks of one or more steps, as one rank sees them.

    pieces      what this rank looks at; pieces that more of the home tokens look at come first
    tokens      of all pieces; in the group that opens a round, all that is there of the root block
    held        the tokens of the root block that are there; spans of it count from the first of them
    lent        tokens of the own block that another host has in this round, whose gradients come home after it
    onward      what of the root block goes on to the next host; nothing but for the group that opens a round
    sends       parts of this rank's root block that others look at in this group; none for the group that opens a round
    returns     gradients of the pieces, for the ranks that opened the round with their blocks
    homecoming  gradients of the root block from those who looked at it in this group
    """

    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    tokens: int
    held: Span
    lent: Span
    onward: Span = (0, 0)
    sends: tuple[Outgoing, ...] = ()
    returns: tuple[Outgoing, ...] = ()
    homecoming: tuple[Incoming, ...] = ()

    @property
    def root(self) -> int:
        """Owner of the block with which this rank opened the round."""
        return self.steps[0].root

    @property
    def home_tokens(self) -> int:
        return _end(self.homecoming)


@dataclass(frozen=True)
class Routes:
    """The routes of all ranks.

    travels   the side of blocks that does, "q" or "kv"
    width     most blocks of a group
    returning whether gradients come back: the last of them come back with nothing left to compute meanwhile, so the
              last group is not the longest; without, the first, which has only the own block's time to arrive
    """

    layout: Layout
    schedule: Schedule
    causal: bool
    travels: str
    width: int
    returning: bool = False

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - small, frozen and hashable
    def rounds(self, rank: int) -> tuple[tuple[Group, ...], ...]:
        """The groups of each round of `rank`; the first of a round is the block that is there already."""
        inner = self.schedule.inner
        steps = self.schedule.steps(rank)
        rounds = []
        for start in range(0, len(steps), inner):
            hops = _cut(inner - 1, self.width, longer_first=self.returning)
            groups = [self._group(rank, start + 1 + a, start + 1 + b) for a, b in hops]
            rounds.append((self._opening(rank, start), *groups))
        return tuple(rounds)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def held(self, owner: int, round_: int) -> Span:
        """What the host that `owner`'s block visits in a round has of it: all that is looked at from then on."""
        if not round_:
            return 0, self.layout.length(owner)
        inner, outer = self.schedule.inner, self.schedule.outer
        hosts = [(owner // inner - r) % outer for r in range(round_, outer)]
        homes = [host * inner + place for host in hosts for place in range(inner)]
        sides = [self.away_side(tile) for home in homes if (tile := self._tile(home, owner))]
        return (min(a for a, _ in sides), max(b for _, b in sides)) if sides else (0, 0)

    def landing_tokens(self, host: int) -> tuple[int, int]:
        """The most tokens that land on any rank of a host at once: of a group, and of gradients on their way home."""
        inner = self.schedule.inner
        groups = [
            group
            for rank in range(host * inner, (host + 1) * inner)
            for round_ in self.rounds(rank)
            for group in round_[1:]
        ]
        return max((g.tokens for g in groups), default=0), max((g.home_tokens for g in groups), default=0)

    def home_side(self, tile: Tile) -> Span:
        """The side of a tile that stays."""
        return tile.kv if self.travels == "q" else tile.q

    def away_side(self, tile: Tile) -> Span:
        """The side of a tile that travels."""
        return tile.q if self.travels == "q" else tile.kv

    def _tile(self, home: int, block: int) -> Tile | None:
        """What rank `home` computes with the block of rank `block`."""
        q_rank, kv_rank = (block, home) if self.travels == "q" else (home, block)
        return self.layout.tile(q_rank, kv_rank, self.causal)

    def _opening(self, rank: int, start: int) -> Group:
        step, round_ = self.schedule.steps(rank)[start], start // self.schedule.inner
        held, tile = self.held(step.root, round_), self._tile(rank, step.root)
        pieces = (Piece(step, tile, _within(held, self.away_side(tile))),) if tile else ()
        onward = _within(held, self.held(step.root, round_ + 1)) if step.outer else (0, 0)
        return Group((step,), pieces, length(held), held, self.held(rank, round_), onward)

    def _group(self, rank: int, start: int, stop: int) -> Group:
        """The group of `rank`'s steps start..stop - 1."""
        steps = self.schedule.steps(rank)[start:stop]
        host = rank // self.schedule.inner * self.schedule.inner
        root, round_ = steps[0].root, start // self.schedule.inner
        held = self.held(root, round_)
        sends, returns = [], []
        for step in steps:
            there = self._pieces(host + step.inner.send_to, start, stop)
            sends += [
                Outgoing(step.inner.send_to, _within(held, self.away_side(p.tile)), p.at[0], _end(there))
                for p in there
                if p.step.block == root
            ]
        pieces = self._pieces(rank, start, stop)
        for piece in pieces:
            peer = piece.step.inner_return.send_to
            there = self._homecoming(host + peer, start, stop)
            returns += [
                Outgoing(peer, piece.at, entry.at[0], _end(there)) for entry in there if host + entry.peer == rank
            ]
        return Group(
            steps,
            pieces,
            _end(pieces),
            held,
            self.held(rank, round_),
            sends=tuple(sends),
            returns=tuple(returns),
            homecoming=self._homecoming(rank, start, stop),
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _pieces(self, rank: int, start: int, stop: int) -> tuple[Piece, ...]:
        seen = [(s, tile) for s in self.schedule.steps(rank)[start:stop] if (tile := self._tile(rank, s.block))]
        seen.sort(key=lambda entry: length(self.home_side(entry[1])), reverse=True)
        pieces: list[Piece] = []
        for step, tile in seen:
            tokens = _end(pieces)
            pieces.append(Piece(step, tile, (tokens, tokens + length(self.away_side(tile)))))
        return tuple(pieces)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _homecoming(self, rank: int, start: int, stop: int) -> tuple[Incoming, ...]:
        host = rank // self.schedule.inner * self.schedule.inner
        steps = self.schedule.steps(rank)[start:stop]
        held = self.held(steps[0].root, start // self.schedule.inner)
        entries: list[Incoming] = []
        for step in steps:
            peer = step.inner_return.recv_from
            if tile := self._tile(host + peer, step.root):
                span, tokens = _within(held, self.away_side(tile)), _end(entries)
                entries.append(Incoming(peer, span, (tokens, tokens + length(span))))
        return tuple(entries)


def _cut(count: int, width: int, longer_first: bool) -> list[Span]:
    """0..count - 1 in as few ranges of at most `width` as will do, nearly equal."""
    parts = -(-count // width)
    if not parts:
        return []
    up = parts - 1 if longer_first else 0
    return list(itertools.pairwise((count * i + up) // parts for i in range(parts + 1)))


def _end(entries: tuple | list) -> int:
    """Tokens of all entries, which lie one after the other."""
    return entries[-1].at[1] if entries else 0


def _within(held: Span, span: Span) -> Span:
    """A part of `held`, counted from its start."""
    return (span[0] - held[0], span[1] - held[0]) if length(span) else (0, 0)
