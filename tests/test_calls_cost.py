"""The cost of a repeated call on the host: files and functions that it enters, and its lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import bmt_burst
from bmt_burst import Mask, SequenceParallel, burst_attn_func, simulate
from tests.cases import random_qkv

FOLDER = str(Path(bmt_burst.__file__).parent)


def count(call: Callable[[], object]) -> tuple[int, int, int]:
    """Return the files, named functions and lines of the library that a call runs here."""
    files, functions, lines = set(), set(), [0]

    def trace(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER):
            return None
        files.add(code.co_filename)
        if not code.co_name.startswith("<"):
            functions.add((code.co_filename, code.co_qualname))

        def trace_lines(_frame, event, _):
            lines[0] += event == "line"
            return trace_lines

        return trace_lines

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(earlier)
    return len(files), len(functions), lines[0]


def make_calls(**options) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a forward, and a forward with its backward. Both ran before."""
    q, k, v, dout = (x.float() for x in random_qkv(1, 64, 4, 2, 16))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        return burst_attn_func(*inputs, **options)

    def step():
        with torch.autograd.set_multithreading_enabled(False):  # the backward on this thread
            return torch.autograd.grad(forward(), inputs, dout)

    for _ in range(2):
        step()
    return forward, step


def test_a_step_of_two_ranks_enters_few_files_and_functions():
    def work(ring):
        _, step = make_calls(causal=True, process_group=ring)
        if ring.rank == 0:
            return count(step)
        return step()

    (files, functions, _), _ = simulate(2, work)
    assert files <= 36
    assert functions <= 150


def test_a_rank_alone_runs_few_lines():
    forward, step = make_calls(mask=SequenceParallel().sequence(Mask.causal(64)))
    assert count(forward)[2] <= 300
    assert count(step)[2] <= 550
