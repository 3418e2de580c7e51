"""The compiled kernels of flash-attn-4 4.0.0b36 on Hopper, and the arguments that it passes them.

The package's Python functions allocate results and scratch, and call compiled kernels: one for a
forward, and for a backward these:

    before   writes delta and the lse in base 2, and fills the sum of dq with 0
    main     adds to the sum of dq; writes dk and dv or, with fewer kv heads, adds to their sums
    after    writes dq or, with fewer kv heads, dq, dk and dv, each from its sum

A program below does the same with kernels that are compiled already. `fa4_bound` finds them.

Shapes: B rows, S queries, T keys, H heads, G kv heads, D head size, M and N queries and keys of a
block. Tokens are dense (B, S, H, D) or packed (B S, H, D), lse then (B, H, S) or (H, B S).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = "4.0.0b36"

# The package finds the sequence of a block with another kernel if there are more.
MOST_SEQUENCES = 256

# The package's functions, as recorded calls name them.
FORWARD, BACKWARD = "_flash_attn_fwd", "_flash_attn_bwd"
BEFORE, AFTER = "_bwd_preprocess", "_bwd_postprocess_convert"

# Where a recorded call has what a program needs.
_AUX_OF_FORWARD, _AUX_OF_BACKWARD, _M_OF_BEFORE, _N_OF_AFTER = 15, 19, 3, 2


@dataclass(frozen=True)
class Options:
    """The sequences of tokens, and which pairs are visible.

    causal        each query sees the keys up to its own, counted from the end
    left, right   otherwise: the band, None for no bound
    cu_seqlens_q  (sequences + 1,) int32: first token of each sequence of packed tokens. None if
                  tokens are dense
    cu_seqlens_k  the same for keys
    longest       bound of the tokens of a sequence
    """

    causal: bool
    left: int | None = None
    right: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    longest: int = 0

    @property
    def packed(self) -> bool:
        """Whether tokens are packed."""
        return self.cu_seqlens_q is not None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the package's functions."""
        found: dict[str, Any] = {"causal": self.causal}
        if not self.causal:
            found |= {"window_size_left": self.left, "window_size_right": self.right}
        if self.packed:
            found |= {
                "cu_seqlens_q": self.cu_seqlens_q,
                "cu_seqlens_k": self.cu_seqlens_k,
                "max_seqlen_q": self.longest,
                "max_seqlen_k": self.longest,
            }
        return found


class Recorded(NamedTuple):
    """A call of a compiled kernel.

    owner      the package's function that made it
    key        the kernel's key among the owner's kernels
    """

    owner: str
    key: tuple[Any, ...]
    kernel: Callable
    arguments: tuple[Any, ...]


class UnknownCall(Exception):
    """The package's function did something else than its program."""


@dataclass(frozen=True)
class ForwardProgram:
    """A forward: out and lse.

    aux  the argument for functions of scores, without any
    """

    kernel: Callable
    aux: tuple[Any, ...]

    @staticmethod
    def of(
        calls: Sequence[Recorded],
        inputs: tuple[Any, ...],
        results: tuple[Tensor, ...],
        options: Options,
        scale: float,
        deterministic: bool,
    ) -> ForwardProgram:
        """Return the program that made these calls, or raise UnknownCall."""
        _check_owners(calls, [FORWARD])
        program = ForwardProgram(calls[0].kernel, _aux(calls[0], _AUX_OF_FORWARD))
        _check_equal(calls, [(program.kernel, program.arguments(inputs, results, options, scale))])
        return program

    @property
    def kernels(self) -> tuple[Callable, ...]:
        """The kernels that it calls."""
        return (self.kernel,)

    def run(
        self,
        inputs: tuple[Any, ...],
        options: Options,
        scale: float,
        deterministic: bool,
        poison: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute out and lse of (q, k, v). `poison` fills them with NaN first."""
        q = inputs[0]
        *tokens, heads, _ = q.shape
        rows = (heads, *tokens) if options.packed else (tokens[0], heads, tokens[1])
        results = (
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            torch.empty(rows, dtype=torch.float32, device=q.device),
        )
        if poison:
            _poison(*results)
        self.kernel(*self.arguments(inputs, results, options, scale))
        return results

    def arguments(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Tensor, ...],
        options: Options,
        scale: float,
    ) -> tuple[Any, ...]:
        """Return the kernel's arguments."""
        return (
            *map(_detach, inputs),
            *results,
            scale,
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            *(None, None, None),  # lengths of queries and of keys, pages
            *_band(options),
            *(None, None),  # sinks, sparse blocks
            self.aux,
            *(None, None),  # sequences of blocks
        )


class Scratch(NamedTuple):
    """Memory of a backward.

    lse2, delta        (..., H, queries rounded to blocks) fp32
    dq                 (..., H, those times the rounded head size) fp32: the sum of dq
    dk, dv             the same of keys, 0 at first. None if k has as many heads as q
    turns              int32, 0 at first: in which order blocks add to dq, dk and dv. None where
                       the order is free
    """

    lse2: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor | None
    dv: Tensor | None
    turns: tuple[Tensor | None, ...]


class ScratchShapes(NamedTuple):
    """Shapes of a `Scratch`. lse2 and delta have `rows`, and dk and dv have `keys`."""

    rows: tuple[int, ...]
    dq: tuple[int, ...]
    keys: tuple[int, ...] | None
    turns: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class BackwardProgram:
    """A backward: dq, dk and dv.

    before, main, after  kernels; `after` has one, or three if k has fewer heads than q
    aux                  the argument for functions of scores, without any
    m, n                 tokens of a block of queries and of keys; n is 0 if nothing depends on it
    width                D, rounded for the sums
    """

    before: Callable
    main: Callable
    after: tuple[Callable, ...]
    aux: tuple[Any, ...]
    m: int
    n: int
    width: int

    @staticmethod
    def of(
        calls: Sequence[Recorded],
        inputs: tuple[Any, ...],
        results: tuple[Tensor, ...],
        options: Options,
        scale: float,
        deterministic: bool,
    ) -> BackwardProgram:
        """Return the program that made these calls, or raise UnknownCall."""
        grouped = inputs[0].shape[-2] != inputs[1].shape[-2]
        _check_owners(calls, [BEFORE, BACKWARD, *[AFTER] * (3 if grouped else 1)])
        before, main, *after = calls
        aux = _aux(main, _AUX_OF_BACKWARD)
        if len(main.arguments) != 22:
            raise UnknownCall(f"expected 22 arguments of {BACKWARD}, got {len(main.arguments)}")
        lse2, delta, dq, dk, dv = main.arguments[4:9]
        if not grouped:
            dk = dv = None
        scratch = Scratch(lse2, delta, dq, dk, dv, main.arguments[16:19])
        program = BackwardProgram(
            before=before.kernel,
            main=main.kernel,
            after=tuple(call.kernel for call in after),
            aux=aux,
            m=before.key[_M_OF_BEFORE],
            n=after[1].key[_N_OF_AFTER] if grouped else 0,
            width=dq.shape[-1] // lse2.shape[-1],
        )
        program.check_scratch(scratch, inputs, options, deterministic)
        _check_equal(calls, [*program.calls(inputs, results, scratch, options, scale)])
        return program

    @property
    def kernels(self) -> tuple[Callable, ...]:
        """The kernels that it calls."""
        return (self.before, self.main, *self.after)

    def run(
        self,
        inputs: tuple[Any, ...],
        options: Options,
        scale: float,
        deterministic: bool,
        poison: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute dq, dk and dv of (q, k, v, out, dout, lse, dlse); dlse may be None.

        `poison` fills results and scratch with NaN first, where it need not be 0.
        """
        q, k, v = inputs[:3]
        results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scratch = self.allocate(inputs, options, deterministic)
        if poison:
            _poison(*results, scratch.lse2, scratch.delta, scratch.dq)
        for kernel, arguments in self.calls(inputs, results, scratch, options, scale):
            kernel(*arguments)
        return results

    def calls(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Tensor, ...],
        scratch: Scratch,
        options: Options,
        scale: float,
    ) -> Iterator[tuple[Callable, tuple[Any, ...]]]:
        """Yield the kernels in their order, with their arguments."""
        q, k, v, out, dout, lse, dlse = inputs
        dq, dk, dv = results
        starts_q, starts_k = options.cu_seqlens_q, options.cu_seqlens_k
        yield (
            self.before,
            (
                *(out, dout, scratch.delta, lse, scratch.lse2, scratch.dq, starts_q, None, dlse),
                *(None, None, 1.0, None, None),  # sparse attention's, sequences of blocks
            ),
        )
        yield (
            self.main,
            (
                *map(_detach, (q, k, v)),
                *(dout, scratch.lse2, scratch.delta, scratch.dq),
                dk if scratch.dk is None else scratch.dk,
                dv if scratch.dv is None else scratch.dv,
                scale,
                *(starts_q, starts_k, None, None),  # no lengths beside these
                *_band(options),
                *scratch.turns,
                self.aux,
                *(None, None),  # sparse blocks, sequences of blocks
            ),
        )
        sums: list[tuple[Any, ...]] = [(scratch.dq, dq, scale, starts_q)]
        if len(self.after) == 3:
            sums += [(scratch.dk, dk, scale, starts_k), (scratch.dv, dv, 1.0, starts_k)]
        for kernel, arguments in zip(self.after, sums, strict=True):
            yield kernel, (*arguments, None, None, None)  # lengths, sinks, sequences of blocks

    def allocate(self, inputs: tuple[Any, ...], options: Options, deterministic: bool) -> Scratch:
        """Allocate scratch."""
        shapes, device = self.shapes(inputs, options, deterministic), inputs[0].device
        floats, numbers = torch.float32, torch.int32
        dk = dv = None
        if shapes.keys is not None:
            dk, dv = torch.zeros((2, *shapes.keys), dtype=floats, device=device).unbind()
        turns = (
            None if shape is None else torch.zeros(shape, dtype=numbers, device=device)
            for shape in shapes.turns
        )
        return Scratch(
            torch.empty(shapes.rows, dtype=floats, device=device),
            torch.empty(shapes.rows, dtype=floats, device=device),
            torch.empty(shapes.dq, dtype=floats, device=device),
            dk,
            dv,
            tuple(turns),
        )

    def shapes(
        self, inputs: tuple[Any, ...], options: Options, deterministic: bool
    ) -> ScratchShapes:
        """Return the shapes of scratch."""
        q, k = inputs[:2]
        queries, keys = q.shape[-3], k.shape[-3]
        batch: tuple[int, ...]
        if options.cu_seqlens_q is None:
            sequences, batch, starts, longest = len(q), (len(q),), 1, (queries, keys)
        else:
            starts = len(options.cu_seqlens_q)
            sequences, batch, longest = starts - 1, (), (options.longest, options.longest)
        q_side = *batch, q.shape[-2], _round_up(queries, starts, self.m)
        k_side = *batch, k.shape[-2], _round_up(keys, starts, self.n)
        q_turns = sequences, q.shape[-2], _blocks(longest[0], self.m), 1
        k_turns = (sequences, k.shape[-2], _blocks(longest[1], self.n), 2) if self.n else None
        return ScratchShapes(
            q_side,
            (*q_side[:-1], q_side[-1] * self.width),
            (*k_side[:-1], k_side[-1] * self.width) if self.n else None,
            (q_turns, k_turns, k_turns) if deterministic else (None, None, None),
        )

    def check_scratch(
        self,
        scratch: Scratch,
        inputs: tuple[Any, ...],
        options: Options,
        deterministic: bool,
    ) -> None:
        """Raise UnknownCall unless `scratch` has the shapes that `allocate` gives it."""
        shapes = self.shapes(inputs, options, deterministic)
        floats = shapes.rows, shapes.rows, shapes.dq, shapes.keys, shapes.keys
        expected = [(shape, torch.float32) for shape in floats]
        expected += [(shape, torch.int32) for shape in shapes.turns]
        found = [*scratch[:5], *scratch.turns]
        for x, (shape, dtype) in zip(found, expected, strict=True):
            if x is None and shape is None:
                continue
            if x is None or x.shape != shape or x.dtype != dtype or not x.is_contiguous():
                seen = None if x is None else (tuple(x.shape), x.dtype)
                raise UnknownCall(f"expected scratch of {shape} {dtype}, got {seen}")


def _blocks(tokens: int, block: int) -> int:
    """Return how many blocks a sequence has."""
    return -(-tokens // block)


def _round_up(tokens: int, starts: int, block: int) -> int:
    """Return how many tokens of scratch hold the sequences, each in whole blocks.

    `starts` is the length of cu_seqlens, or 1 for a sequence alone.
    """
    return (tokens + starts * block - 1) // block * block if block else 0


def _band(options: Options) -> tuple[int | None, int | None]:
    """Return the kernels' arguments for the band. A causal kernel has the band in its code."""
    return (None, None) if options.causal else (options.left, options.right)


def _detach(x: Tensor) -> Tensor:
    """Return x without its graph: kernels refuse tensors that require a gradient."""
    return x.detach() if x.requires_grad else x


def _poison(*tensors: Tensor) -> None:
    """Fill tensors with NaN."""
    for x in tensors:
        x.fill_(torch.nan)


def _check_owners(calls: Sequence[Recorded], expected: list[str]) -> None:
    """Raise UnknownCall unless these functions made the calls."""
    if (owners := [call.owner for call in calls]) != expected:
        raise UnknownCall(f"expected kernels of {expected}, got {owners}")


def _aux(call: Recorded, place: int) -> tuple[Any, ...]:
    """Return the argument for functions of scores, or raise UnknownCall if it has any."""
    aux = call.arguments[place] if len(call.arguments) > place else None
    if not isinstance(aux, tuple) or any(x is not None for x in aux):
        raise UnknownCall(f"expected no functions of scores in {call.owner}, got {aux!r}")
    return aux


def _check_equal(
    calls: Sequence[Recorded], expected: Sequence[tuple[Callable, tuple[Any, ...]]]
) -> None:
    """Raise UnknownCall unless the calls have these arguments."""
    for call, (_, arguments) in zip(calls, expected, strict=True):
        if len(call.arguments) != len(arguments):
            got = len(call.arguments)
            raise UnknownCall(f"expected {len(arguments)} arguments of {call.owner}, got {got}")
        for place, (got, wanted) in enumerate(zip(call.arguments, arguments, strict=True)):
            if _describe(got) != _describe(wanted):
                raise UnknownCall(
                    f"expected argument {place} of {call.owner} to be {_describe(wanted)}, "
                    f"got {_describe(got)}"
                )


def _describe(x: Any) -> Any:
    """Return what tells arguments apart: of a tensor its memory, otherwise its type and value."""
    if isinstance(x, Tensor):
        return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.device
    return type(x), x
