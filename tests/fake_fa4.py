"""flash-attn-4's functions and their compiled kernels, written out for the CPU.

The functions allocate, look for kernels by keys and call them as those of version 4.0.0b36 do on
Hopper. The kernels compute in fp32, one sequence after the other.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch

from bmt_burst.kernels.fa4_programs import AFTER, BACKWARD, BEFORE, FORWARD
from tests.test_kernels import FlashAttention

M, N, WIDTH = 8, 4, 64  # tokens of blocks, and what head sizes are rounded to


class Aux(NamedTuple):
    tensors: object = None
    scalars: object = None


def round_up(tokens: int, starts: int, block: int) -> int:
    return (tokens + starts * block - 1) // block * block


class Package:
    """Its functions, as those of a module.

    runs      how often each function was called
    launches how often each kernel was called
    wrong     is added to what the functions return, but not to what the kernels compute
    """

    def __init__(self, monkeypatch):
        self.math, self.wrong = FlashAttention(), 0.0
        self.code = {}  # of the next kernel that is compiled
        self.runs = {FORWARD: 0, BACKWARD: 0}
        self.launches = {FORWARD: 0, BACKWARD: 0, BEFORE: 0, AFTER: 0}
        self.more_arguments: tuple = ()
        functions = {
            FORWARD: lambda *args, **options: self.forward(*args, **options),
            BACKWARD: lambda *args, **options: self.backward(*args, **options),
            BEFORE: lambda *args: self.call(BEFORE, *args),
            AFTER: lambda *args: self.call(AFTER, *args),
        }
        for function in functions.values():
            function.compile_cache = {}
            function.__module__ = "fake_fa4_interface"
        self.functions = functions
        module = type(sys)("fake_fa4_interface")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def call(self, name, key, *arguments):
        """Call a kernel, which is compiled when its key is new."""
        cache = self.functions[name].compile_cache
        if key not in cache:
            cache[key] = self.compile(name)
        cache[key](*arguments, *self.more_arguments)

    def compile(self, name):
        code = self.code
        kernel = {
            FORWARD: lambda *arguments: self.compute(code, *arguments),
            BEFORE: prepare,
            BACKWARD: lambda *arguments: self.add(code, *arguments),
            AFTER: finish,
        }[name]

        def launch(*arguments):
            self.launches[name] += 1
            kernel(*arguments[: len(arguments) - len(self.more_arguments)])

        return launch

    def forward(self, q, k, v, return_lse, softmax_scale, softcap=None, **options):
        self.runs[FORWARD] += 1
        starts, band = unpack_options(options)
        *tokens, heads, _ = q.shape
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(
            (heads, *tokens) if starts[0] is not None else (*tokens[:1], heads, tokens[1])
        )
        key = (
            q.dtype,
            q.shape[-1],
            heads // k.shape[-2],
            softcap,
            options["causal"],
            starts[0] is None,
        )
        key += tuple(x is None for x in band)
        self.code = {"softcap": softcap or 0.0, "causal": options["causal"]}
        self.call(
            FORWARD, key, q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, *starts,
            None, None, None, *band, None, None, Aux(), None, None,
        )  # fmt: skip
        out += self.wrong
        return out, lse, None

    def backward(
        self, q, k, v, out, dout, lse, softmax_scale, deterministic, softcap=None, dlse=None,
        **options,
    ):  # fmt: skip
        self.runs[BACKWARD] += 1
        starts, band = unpack_options(options)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        (heads, size), groups = q.shape[-2:], k.shape[-2]
        width = math.ceil(size / WIDTH) * WIDTH
        batch, count = ((), len(starts[0])) if starts[0] is not None else ((len(q),), 1)
        rows, keys = round_up(q.shape[-3], count, M), round_up(k.shape[-3], count, N)
        lse2, delta = (torch.empty(*batch, heads, rows) for _ in range(2))
        dq_sum, sums = torch.zeros(*batch, heads, rows * width), [dk, dv]
        if groups != heads:
            sums = [torch.zeros(*batch, groups, keys * width) for _ in range(2)]
        turns = [None] * 3
        if deterministic:
            sequences = len(q) if starts[0] is None else count - 1
            longest = q.shape[1] if starts[0] is None else options["max_seqlen_q"]
            turns[0] = torch.zeros(sequences, heads, -(-longest // M), 1, dtype=torch.int32)
            if groups != heads:
                longest = k.shape[1] if starts[0] is None else options["max_seqlen_k"]
                shape = sequences, groups, -(-longest // N), 2
                turns[1:] = [torch.zeros(shape, dtype=torch.int32) for _ in range(2)]
        common = q.dtype, size, size, M, starts[0] is None
        self.call(
            BEFORE, (*common, dlse is None), out, dout, delta, lse, lse2, dq_sum, starts[0], None,
            dlse, None, None, 1.0, None, None,
        )  # fmt: skip
        key = *common, heads // groups, softcap, options["causal"], deterministic
        self.code = {"softcap": softcap or 0.0, "causal": options["causal"]}
        self.call(
            BACKWARD, (*key, *(x is None for x in band)), q.detach(), k.detach(), v.detach(), dout,
            lse2, delta, dq_sum, *sums, softmax_scale, *starts, None, None, *band, *turns, Aux(),
            None, None,
        )  # fmt: skip
        after = (q.dtype, size, M), (q.dtype, size, N)
        self.call(AFTER, after[0], dq_sum, dq, softmax_scale, starts[0], None, None, None)
        if groups != heads:
            self.call(AFTER, after[1], sums[0], dk, softmax_scale, starts[1], None, None, None)
            self.call(AFTER, after[1], sums[1], dv, 1.0, starts[1], None, None, None)
        dq += self.wrong
        return dq, dk, dv

    def compute(self, code, q, k, v, out, lse, scale, *rest):
        starts, band = rest[:2], rest[5:7]
        found = self.math.forward(q, k, v, scale, **code, **sequences(starts, band))
        out.copy_(found[0])
        lse.copy_(found[1])

    def add(self, code, q, k, v, dout, lse2, delta, dq_sum, dk, dv, scale, *rest):
        starts, band, turns = rest[:2], rest[4:6], rest[6:9]
        assert all(x is None or not x.any() for x in turns), "semaphores must be 0"
        rows = (x[..., : q.shape[-3]] for x in (lse2 * math.log(2), delta))
        dq, *of_keys = self.math.backward(
            dout, q, k, v, *rows, scale, **code, **sequences(starts, band)
        )
        add_tokens(dq_sum, dq, scale)
        for into, grad, factor in zip((dk, dv), of_keys, (scale, 1.0), strict=True):
            if into.shape == grad.shape:
                into.copy_(grad)
            else:
                add_tokens(into, grad, factor)


def prepare(out, dout, delta, lse, lse2, dq_sum, starts, lengths, dlse, *rest):
    found = (out * dout).sum(-1).transpose(-1, -2)
    delta[..., : lse.shape[-1]] = found if dlse is None else found - dlse
    lse2[..., : lse.shape[-1]] = lse / math.log(2)
    fill_sum(dq_sum)


def fill_sum(total):
    total.zero_()


def sequences(starts, band):
    """The arguments that the functions written out have for these of a kernel."""
    lengths = {} if starts[0] is None else {"max_seqlen_q": 1 << 30, "max_seqlen_k": 1 << 30}
    sides = {"window_size_left": band[0], "window_size_right": band[1]}
    return {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], **lengths, **sides}


def unpack_options(options):
    causal = options["causal"]
    band = (options.get(f"window_size_{side}") for side in ("left", "right"))
    starts = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    return starts, (None, None) if causal else tuple(band)


def add_tokens(total, grad, scale):
    """Add a gradient of tokens to its sum, which is not scaled."""
    tokens, _, size = grad.shape[-3:]
    width = math.ceil(size / WIDTH) * WIDTH
    view = total.view(*total.shape[:-1], -1, width)
    view[..., :tokens, :size] += grad.transpose(-2, -3) / scale


def finish(total, grad, scale, *rest):
    tokens, _, size = grad.shape[-3:]
    width = math.ceil(size / WIDTH) * WIDTH
    view = total.view(*total.shape[:-1], -1, width)
    grad.copy_(view[..., :tokens, :size].transpose(-2, -3) * scale)
