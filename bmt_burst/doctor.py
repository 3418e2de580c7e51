"""The doctor checks what a machine has and whether it works: python -m bmt_burst.doctor

It prints a line for each of GPUs and their links, NCCL, every kernel, BMTrain, and a ring between
two processes. A line says what to do about what is missing. The exit code is 1 if anything that is
installed does not work.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import Layout, burst_attn_func, init_sequence_parallel, kernels
from .sequence.tile import KernelCall
from .spec import Spec
from .transport import ALONE

_TIMEOUT = 120  # seconds
_SPEC = Spec(scale=0.125)
_DOCUMENTS = (0, 100), (100, 230)  # then a gap
_CALLS = {
    "causal attention": KernelCall.whole(256, causal=True),
    "documents": KernelCall(256, 256, tuple((span, span) for span in _DOCUMENTS), right=0),
    "a window": KernelCall(256, 256, (((0, 256), (0, 256)),), left=50, right=0),
}
# relative errors, far above those of a working kernel
_BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class Missing(Exception):
    """Something is missing. The text says what to do about it."""


def main(argv: Sequence[str] = ()) -> int:
    """Print a line for each check. Return the exit code."""
    parser = argparse.ArgumentParser(prog="bmt_burst.doctor", description="Check this machine.")
    parser.parse_args(argv)
    broken = False
    for name, check in list_checks():
        if sys.stdout.isatty():  # the line of the result replaces it
            print(f"..  {name}", end="\r", flush=True)
        try:
            mark, text = "ok", check()
        except Missing as reason:
            mark, text = "--", str(reason)
        except Exception as error:  # noqa: BLE001 - the doctor reports whatever is wrong
            mark, text, broken = "!!", f"{type(error).__name__}: {error}", True
        print(f"{mark}  {name:<12} {text}", flush=True)
    print("\nok works   -- missing   !! does not work")
    return int(broken)


def list_checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and functions. A function returns a text, or raises Missing or another error."""
    yield "torch", _check_torch
    yield "GPUs", _check_gpus
    yield "links", _check_links
    yield "NCCL", _check_nccl
    for name in kernels.names():
        yield name, functools.partial(_check_kernel, name)
    yield "BMTrain", _check_bmtrain
    yield "ring", _check_ring


def _check_torch() -> str:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return f"{torch.__version__} ({built}), Python {sys.version.split()[0]}"


def _check_gpus() -> str:
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "no NVIDIA driver or GPU"
        raise Missing(f"{why}: everything runs on the CPU, slowly")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds}, {memory:.0f} GiB each"


def _check_links() -> str:
    pairs = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    if not pairs:
        raise Missing("fewer than two GPUs here")
    reach = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    way = "copy engines" if reach == len(pairs) else "NCCL"
    return f"{reach} of {len(pairs)} pairs of GPUs reach each other's memory: deliveries use {way}"


def _check_nccl() -> str:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise Missing("needs GPUs and a CUDA build of torch")
    return ".".join(map(str, torch.cuda.nccl.version()))


def _check_kernel(name: str) -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 256, h, 64, device=device, dtype=dtype, generator=generator)
        for h in (4, 2, 2, 4)
    )
    kernel = kernels.load(name)
    if reason := kernel.refuses(_SPEC, q, k):
        raise Missing(reason)
    if reason := kernel.broken():
        raise RuntimeError(reason)
    worst = 0.0
    for what, call in _CALLS.items():
        error = _error(kernel, call, q, k, v, dout)
        if not error < _BOUNDS[dtype]:  # or NaN
            raise RuntimeError(
                f"results are wrong by {error:.1e} (relative) for {what}: do not use it, and "
                "report this"
            )
        worst = max(worst, error)
    return f"{dtype} on {device}, error {worst:.1e}"


def _error(kernel: kernels.Kernel, call: KernelCall, *tensors: torch.Tensor) -> float:
    """Return the worst relative error of a kernel's results."""
    mine = _results(kernel, call, *tensors)
    exact = _results(kernels.load("reference"), call, *(x.double() for x in tensors))
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(mine, exact, strict=True)]
    return float(torch.stack(errors).amax())


def _results(kernel: kernels.Kernel, call: KernelCall, q, k, v, dout) -> list[torch.Tensor]:
    out, lse = kernel.forward(q, k, v, call, _SPEC)
    return [out, *kernel.backward(dout, q, k, v, out, lse, None, call, _SPEC)]


def _check_bmtrain() -> str:
    try:
        found = version("bmtrain")
    except PackageNotFoundError:
        hint = "not installed: bash train/install_gpu.sh; training then uses FSDP2"
        raise Missing(hint) from None
    if not torch.cuda.is_available():
        raise Missing(f"{found} is installed, but needs GPUs")
    import bmtrain  # noqa: F401 - after torch, which brings NCCL

    return found


def _check_ring() -> str:
    """Compare the attention of two processes with the attention of one."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(_run_rank, (Path(folder),), nprocs=2, join=False)
        deadline = time.monotonic() + _TIMEOUT
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"the ring of two processes took more than {_TIMEOUT} s")
        return (Path(folder) / "report").read_text()


def _run_rank(rank: int, folder: Path) -> None:
    """Run one of the two processes of `_check_ring`. Write a report."""
    torch.set_num_threads(1)
    cuda = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl" if cuda else "gloo", meeting, rank=rank, world_size=2)
    sp = init_sequence_parallel(inner_size=2)
    dtype = torch.bfloat16 if cuda else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    whole = torch.randn(1, 513, 4, 64, device=device, dtype=dtype, generator=generator)
    mine = sp.shard(whole)
    # a kernel that need not be compiled, or both processes would compile it
    flash = "aten" if cuda and torch.cuda.get_device_capability(device)[0] >= 8 else "auto"
    with torch.no_grad():
        out = burst_attn_func(mine, mine, mine, causal=True, flash=flash, **sp.groups)
        alone = burst_attn_func(whole, whole, whole, causal=True, flash=flash, process_group=ALONE)
    exact = Layout.zigzag(513, 2).shard(alone, rank)
    error = float((out.double() - exact).norm() / exact.double().norm())
    if not error < _BOUNDS[dtype]:
        raise RuntimeError(f"the ring's result is wrong by {error:.1e} (relative)")
    way = "by copy engines" if sp.rings.inner.held_bytes else "over NCCL" if cuda else "over gloo"
    if rank == 0:
        (folder / "report").write_text(f"two processes {way}, error {error:.1e}")
    dist.barrier()
    # torch 2.13: a gloo thread that drops a tensor while the interpreter shuts down aborts the
    # process
    os._exit(0)


if __name__ == "__main__":
    # for the ring's processes, and for next time
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    sys.exit(main(sys.argv[1:]))
