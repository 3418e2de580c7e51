"""BMTrain's own Python code on CPUs: its NCCL is gloo here, its streams are nothing, its GPU memory
is the CPU's.

BMTrain asserts that tensors are on a GPU: its modules are imported without their assertions. What
this cannot show is what depends on streams, on NCCL, and on BMTrain's CUDA kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import types
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import torch
import torch._dynamo  # it and fsdp before torch is patched
import torch.distributed as dist
import torch.distributed.fsdp


class WithoutAssertions(SourceFileLoader):
    """What `python -O` makes of a module."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", optimize=1)


class BMTrainFinder:
    """Finds BMTrain's modules where they are, to be loaded without assertions."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == "bmtrain" else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = WithoutAssertions(name, spec.origin)
        return spec


class Nothing:
    """A stream or an event: whatever is asked of it is done."""

    cuda_stream = 0

    def __init__(self, *_args, **_options):
        pass

    def __getattr__(self, name):
        return Nothing


class CpuTorch:
    """torch for a module, with "cuda" meaning the CPU in what makes tensors."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, *_args):
        return torch.device("cpu")


def _on_cpu(function):
    def call(self, *args, device=None, **options):
        return function(*args, **options)

    return call


for _name in ("tensor", "empty", "zeros", "empty_like", "arange"):
    setattr(CpuTorch, _name, _on_cpu(getattr(torch, _name)))


class Communicator:
    """Ranks of a gloo group."""

    def __init__(self, group, ranks):
        self.group, self.ranks = group, ranks


def _bytes(storage) -> torch.Tensor:
    """The tensor behind one of BMTrain's storages, or of bmt_burst's own stand-ins for them."""
    if hasattr(storage, "tensor"):
        return storage.tensor.view(-1).view(torch.uint8)
    return torch.tensor([], dtype=storage.dtype).set_(storage)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_exchange: list[dist.P2POp] = []


class Nccl:
    """bmtrain.nccl's functions over gloo."""

    @staticmethod
    def getUniqueId() -> bytes:
        return os.urandom(16)

    @staticmethod
    def commInitRank(unique_id: bytes, size: int, rank: int) -> Communicator:
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (unique_id, rank))
        mine = None
        for name in sorted({name for name, _ in everyone}):
            members = sorted(
                (theirs, world) for world, (other, theirs) in enumerate(everyone) if other == name
            )
            ranks = [world for _, world in members]
            group = dist.new_group(ranks)
            mine = Communicator(group, ranks) if name == unique_id else mine
        return mine

    @staticmethod
    def commCount(comm: Communicator) -> int:
        return len(comm.ranks)

    @staticmethod
    def commRank(comm: Communicator) -> int:
        return comm.ranks.index(dist.get_rank())

    @staticmethod
    def allReduce(source, target, op, comm) -> None:
        total = _bytes(source).clone()
        dist.all_reduce(total, _OPS[op], group=comm.group)
        _bytes(target).copy_(total)

    @staticmethod
    def allGather(source, target, comm) -> None:
        dist.all_gather_into_tensor(_bytes(target), _bytes(source).clone(), group=comm.group)

    @staticmethod
    def reduceScatter(source, target, op, comm) -> None:
        total = _bytes(source).clone()
        dist.all_reduce(total, _OPS[op], group=comm.group)
        _bytes(target).copy_(total.chunk(len(comm.ranks))[Nccl.commRank(comm)])

    @staticmethod
    def broadcast(source, target, root, comm) -> None:
        _bytes(target).copy_(_bytes(source))
        dist.broadcast(_bytes(target), group=comm.group, group_src=root)

    @staticmethod
    def send(source, peer, comm) -> None:
        _exchange.append(dist.P2POp(dist.isend, _bytes(source), group=comm.group, group_peer=peer))

    @staticmethod
    def recv(target, peer, comm) -> None:
        _exchange.append(dist.P2POp(dist.irecv, _bytes(target), group=comm.group, group_peer=peer))

    @staticmethod
    def groupStart() -> None:
        _exchange.clear()

    @staticmethod
    def groupEnd() -> None:
        for work in dist.batch_isend_irecv(list(_exchange)) if _exchange else []:
            work.wait()


def install(*packages: str) -> None:
    """Makes this process one of BMTrain's ranks, after torch.distributed's gloo group is made.

    What `packages` do on GPUs they do on the CPU too.
    """
    here = torch.cuda
    here.Stream = here.Event = Nothing
    here.current_stream = here.synchronize = here.set_device = lambda *_args: Nothing()
    here.current_device = lambda: 0
    here.stream = lambda _stream: contextlib.nullcontext()
    here.get_rng_state = lambda *_args: torch.get_rng_state()
    here.set_rng_state = lambda state, *_args: torch.set_rng_state(state)
    for kind in ("Float", "Double", "Half", "BFloat16", "Char", "Byte", "Short", "Int"):
        setattr(here, f"{kind}Storage", getattr(torch, f"{kind}Storage"))
    here.FloatTensor = torch.FloatTensor
    torch.Tensor.record_stream = lambda self, _stream: None
    torch.Tensor.cuda = lambda self, *_args: self.clone()
    sys.modules["bmtrain.C"] = types.ModuleType("bmtrain.C")
    sys.meta_path.insert(0, BMTrainFinder)

    import bmtrain
    import bmtrain.distributed.ops as ops

    import bmt_burst.adapters.bmtrain
    import bmt_burst.transport.bmtrain as transport
    import train.engine.bmtrain

    bmtrain.nccl.NCCLCommunicator = Communicator
    for name in [name for name in vars(Nccl) if not name.startswith("_")]:
        setattr(bmtrain.nccl, name, getattr(Nccl, name))
        setattr(ops, "nccl" + name[0].upper() + name[1:], getattr(Nccl, name))
    for package in packages:
        importlib.import_module(package)
    cpu, roots = CpuTorch(), {"bmtrain", *(package.split(".")[0] for package in packages)}
    modules = [
        module
        for name, module in sys.modules.items()
        if name.split(".")[0] in roots and hasattr(module, "torch")
    ]
    for module in [*modules, bmt_burst.adapters.bmtrain, train.engine.bmtrain, transport]:
        module.torch = cpu
    transport.BMTrainTransport.device_types = frozenset({"cpu"})
    bmtrain.init_distributed(seed=0)
    # BMTrain takes as many as there are CPUs for a rank, which wait for each other
    torch.set_num_threads(1)


def run_example(folder: Path, name: str, changes: dict[str, str]) -> None:
    """Run a script of examples with other texts in it, such as smaller sizes."""
    source = (Path(__file__).parents[1] / f"examples/{name}.py").read_text()
    for there, here in changes.items():
        assert there in source
        source = source.replace(there, here)
    script = folder / f"example-{name}-{os.environ['RANK']}.py"
    script.write_text(source)
    runpy.run_path(str(script), run_name="__main__")
