"""What several tests share: dense attention, ways to lay out simulated ranks, real ranks as processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bmt_burst.transport.simulator import SimulatedRing
from train.distributed import free_port

ROOT = Path(__file__).resolve().parents[1]


GPUS = torch.cuda.device_count()
_PRELOADED = ["train.pretrain", "bmt_burst.engine.torch", "tests.helpers"]  # seconds of imports, which forks share
# Ranks that NCCL can make here: it wants a GPU for each, but for recent versions with this set.
RANKS = max(GPUS, 4) if GPUS and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else GPUS


def needs_ranks(count: int):
    """A mark that skips a test where NCCL cannot make so many."""
    return pytest.mark.skipif(count > RANKS, reason=f"needs NVIDIA GPUs, {count} or more; this machine has {GPUS}")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention written out over a whole sequence: out (B, S, H, D) and lse (B, H, S)."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def random_qkv(batch: int, tokens: int, heads: int, kv_heads: int, head_size: int, dtype=torch.float64, seed: int = 0):
    """q, k, v and an output gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, h, head_size) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def ring_arguments(ring: SimulatedRing, inner: int) -> dict:
    """burst_attn_func's group arguments: a single ring, or a double ring of hosts with `inner` ranks."""
    if inner == ring.size:
        return {"process_group": ring}
    host, place = divmod(ring.rank, inner)
    intra = ring.subring(range(host * inner, (host + 1) * inner))
    return {"double_group": (intra, ring.subring(range(place, ring.size, inner)))}


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-300))


def run_ranks(size: int, work: Callable, *args, backend: str = "gloo") -> list:
    """Runs `work(rank, *args)` in `size` joined processes; returns the results, or raises the first failure.

    `work` must be a module's function. With backend "nccl" each process has a GPU, or they share those there are.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(_PRELOADED)
        arguments = size, folder, backend, work, args
        mp.start_processes(_rank_main, arguments, size, start_method="spawn" if GPUS else "forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def torchrun(size: int, *command, python: Sequence[str] = (), timeout: float = 200, **options):
    """A script and its arguments on `size` ranks under torchrun; `python` are flags of the interpreter."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--no-python"]
    place = []
    if 0 < GPUS < size:  # a rank is to find as many ranks on its host as there are GPUs, and take one that is there
        place = ["bash", "-c", f'LOCAL_RANK=$((LOCAL_RANK % {GPUS})) LOCAL_WORLD_SIZE={GPUS} exec "$@"', "rank"]
    line = [sys.executable, *launcher, *place, sys.executable, *python, *map(str, command)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)


def pretrain(arguments: Sequence[str], said: Path, timeout: float, processes: int = 1) -> int:
    """Runs pretrain.py on ranks that are forked from a process that has imported torch once.

    Returns the exit code of one that failed, or 0; what they say goes to the file `said`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    said.write_text("")
    port = free_port()
    ranks = [
        context.Process(target=_pretrain_main, args=(list(arguments), said, rank, processes, port))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(end - time.monotonic(), 0))
        rank.kill()
        rank.join()
    return next((rank.exitcode for rank in ranks if rank.exitcode), 0)


def _pretrain_main(arguments: list[str], said: Path, rank: int, processes: int, port: int) -> None:
    from train import ending
    from train.pretrain import main

    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if processes > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        torch.set_num_threads(1)
    ending.leave(main(arguments))


def _rank_main(rank: int, size: int, folder: str, backend: str, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % GPUS)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()
    os._exit(0)  # torch 2.13: a gloo thread that drops a tensor while the interpreter shuts down aborts the process
