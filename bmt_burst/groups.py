"""Which ranks share a sequence, and the rings between them.

    sp = init_sequence_parallel(sp_size=4)        # after the one or the other's init, on every rank
    tokens, labels = sp.shard(tokens), sp.shard(shift_labels(tokens))
    positions = sp.positions(seq_len)
    out = burst_attn_func(q, k, v, causal=True, **sp.groups)

Consecutive ranks share a sequence: sequence parallel group i is ranks i * sp_size to (i + 1) * sp_size - 1.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import as_int, check_dim, plain
from .layout import Layout, shard
from .transport import ALONE, MESSAGE_BYTES, Transport
from .transport.bmtrain import BMTrainTransport, bmtrain_transport, initialized_bmtrain, new_communicator
from .transport.processes import host_name
from .transport.torch_dist import torch_transport

Group = (
    Any  # a torch.distributed ProcessGroup or DeviceMesh of one dimension, a bmtrain NCCLCommunicator or a Transport
)
_groups_made = itertools.count()


@dataclass(frozen=True)
class Rings:
    """The rings of a rank: `inner` within a host, `outer` between hosts; without `double` the outer is of one rank."""

    inner: Transport
    outer: Transport
    double: bool = False

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    @property
    def rank(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks (a line each) in rank order, over both rings.

        Raises ValueError if these are no grid of ranks.
        """
        if not self.double:
            return self.inner.gather(message)
        shape = f"{self.inner.size} x {self.outer.size}".encode()
        shapes = {s.decode() for ring in (self.inner, self.outer) for s in ring.gather(shape)}
        if len(shapes) > 1:
            raise ValueError(f"double_group's rings differ in size between ranks: {sorted(shapes)}")
        here = b"\n".join(self.inner.gather(message))
        hosts = self.outer.gather(here, longest=self.inner.size * (MESSAGE_BYTES + 1))
        return [reply for host in hosts for reply in host.split(b"\n")]

    def gather_tensors(self, x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Contiguous x of all ranks in rank order; `shapes` are those of all ranks."""
        start = self.outer.rank * self.inner.size
        here = self.inner.all_gather([x], [[shape] for shape in shapes[start : start + self.inner.size]])
        host_shapes = [shapes[i : i + self.inner.size] for i in range(0, self.size, self.inner.size)]
        hosts = self.outer.all_gather([tensor for [tensor] in here], host_shapes)
        return [tensor for host in hosts for tensor in host]


def make_rings(process_group: Group | None, double_group: Sequence[Group | None]) -> Rings:
    """The rings that `burst_attn_func`'s arguments name.

    Without a double group: one ring over `process_group`, by default all ranks of BMTrain or torch.distributed, or this
    process alone where neither is initialised. With double_group=(intra, inter): an inner ring over intra, the ranks of
    a host, and an outer one over inter, the ranks at one place of all hosts; process_group must then be None. A rank's
    number in the sequence is then (its rank in inter) * (size of intra) + (its rank in intra). A group is a
    torch.distributed ProcessGroup or DeviceMesh of one dimension, after bmtrain.init_distributed also a bmtrain
    NCCLCommunicator, or a Transport.

    Raises TypeError for anything else, ValueError for a mesh of more dimensions, if this rank is in none of the groups
    or if both kinds are given.
    """
    if not isinstance(double_group, Sequence) or len(double_group) != 2:
        raise TypeError(f"double_group must be a pair (intra, inter) of groups, got {double_group!r}")
    intra, inter = double_group
    if (intra is None) != (inter is None):
        raise ValueError(f"double_group needs both groups or neither, got {double_group!r}")
    if intra is None:
        return Rings(_transport(process_group), ALONE)
    if process_group is not None:
        raise ValueError("give either process_group or double_group: the double group alone names all ranks")
    return Rings(_transport(intra), _transport(inter), double=True)


def _transport(group: Group | None) -> Transport:
    if isinstance(group, Transport):
        return group
    bmtrain = initialized_bmtrain()
    if bmtrain and isinstance(group, bmtrain.nccl.NCCLCommunicator):
        return bmtrain_transport(group)
    if group is None and bmtrain:
        return bmtrain_transport(bmtrain.config["comm"])
    if group is None:
        return torch_transport(dist.group.WORLD) if dist.is_initialized() else ALONE
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")
    if isinstance(group, dist.ProcessGroup):
        return torch_transport(group)
    if isinstance(group, dist.DeviceMesh):
        return torch_transport(_mesh_group(group))
    raise TypeError(
        "a group must be a torch.distributed ProcessGroup, a bmtrain NCCLCommunicator or a Transport, got "
        f"{type(group).__name__}"
    )


def _mesh_group(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(f"a group must be one dimension of a DeviceMesh, got one of {names}: give mesh[{names[-1]!r}]")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the DeviceMesh it was given, {mesh.mesh.tolist()}")
    return mesh.get_group()


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among the ranks that share its sequence, and the layout of that sequence; by default alone.

    `groups` are the keyword arguments that burst_attn_func takes to run over these ranks.
    """

    rank: int = 0
    size: int = 1
    layout: str = "zigzag"
    process_group: Group | None = ALONE
    double_group: tuple[Group | None, Group | None] = (None, None)

    @property
    def groups(self) -> dict[str, Any]:
        return {"process_group": self.process_group, "double_group": self.double_group, "layout": self.layout}

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """Global position ids of this rank's tokens of a sequence of `seq_len`: (S_local,) int64."""
        return Layout(self.layout, seq_len, self.size).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of `x`, which is whole and the same on every rank, cut along `dim`."""
        return shard(x, self.rank, self.size, dim, self.layout)

    def unshard(self, x: Tensor, seq_len: int, dim: int = 1) -> Tensor:
        """The whole of what `shard` cut, on every rank, without gradient; every rank must call it with its part `x`.

        Raises ValueError on every rank if any rank's `x` does not have its number of a sequence of `seq_len` tokens, or
        ranks differ in the other dimensions, the dtype or the arguments.
        """
        rings = make_rings(self.process_group, self.double_group)
        mine = {"shape": list(x.shape), "dtype": str(x.dtype), "seq_len": plain(seq_len), "dim": plain(dim)}
        everyone = [json.loads(reply) for reply in rings.gather(json.dumps(mine).encode())]
        for rank, theirs in enumerate(everyone):
            if any(theirs[name] != mine[name] for name in ("dtype", "seq_len", "dim")):
                raise ValueError(f"ranks differ in what they join: rank {self.rank} has {mine}, rank {rank} {theirs}")
        dim = check_dim(x, dim)
        layout, shapes = Layout(self.layout, seq_len, self.size), [theirs["shape"] for theirs in everyone]
        for rank, shape in enumerate(shapes):
            expected = list(x.shape)
            expected[dim] = layout.length(rank)
            if shape != expected:
                raise ValueError(f"rank {rank}'s x is {shape}, of {seq_len} tokens along {dim} it should be {expected}")
        return layout.unshard(rings.gather_tensors(x.detach().contiguous(), [torch.Size(s) for s in shapes]), dim)


def init_sequence_parallel(
    sp_size: int | None = None, *, layout: str = "zigzag", inner_size: int | None = None
) -> SequenceParallel:
    """Makes the groups of sequence parallelism; every rank must call it, with one meaning.

    Over BMTrain's ranks after bmtrain.init_distributed, else over torch.distributed's.

    sp_size     ranks that share a sequence, by default all; must divide the world size
    inner_size  ranks of a host, for the double ring; must divide sp_size. By default as the ranks lie on hosts: a
                double ring if each sequence has the same number on each of several hosts, else a single one.

    Raises ValueError on every rank where a size does not divide, ranks differ, or BMTrain runs with tensor or pipeline
    parallelism; RuntimeError if neither BMTrain nor torch.distributed is initialised.
    """
    world = _world()
    sp_size, inner_size = world.size if sp_size is None else plain(sp_size), plain(inner_size)
    arguments = f"sp_size={sp_size!r}, inner_size={inner_size!r}, layout={layout!r}".encode("ascii", "replace")[:300]
    replies = world.gather(json.dumps([arguments.decode(), host_name().decode()]).encode())
    calls, hosts = zip(*map(json.loads, replies), strict=True)
    if len(set(calls)) > 1:
        raise ValueError(f"ranks differ in init_sequence_parallel's arguments: {list(calls)}")
    sp_size = as_int("sp_size", sp_size)
    if sp_size < 1 or world.size % sp_size:
        raise ValueError(f"sp_size={sp_size} does not divide the world of {world.size} ranks")
    inner_size = _ranks_a_host(hosts, sp_size) if inner_size is None else as_int("inner_size", inner_size)
    if inner_size < 1 or sp_size % inner_size:
        raise ValueError(f"inner_size={inner_size} does not divide sp_size={sp_size}")
    Layout(layout, sp_size, sp_size)  # refuses an unknown name now
    rank = world.rank % sp_size
    sequences = [range(start, start + sp_size) for start in range(0, world.size, sp_size)]
    if sp_size == 1:
        return SequenceParallel(layout=layout)
    if inner_size in (1, sp_size):
        return SequenceParallel(rank, sp_size, layout, process_group=_own_group(world, sequences))
    by_host = [ranks[i : i + inner_size] for ranks in sequences for i in range(0, sp_size, inner_size)]
    by_place = [ranks[i::inner_size] for ranks in sequences for i in range(inner_size)]
    return SequenceParallel(rank, sp_size, layout, None, (_own_group(world, by_host), _own_group(world, by_place)))


def _world() -> Transport:
    """All ranks, of BMTrain or torch.distributed."""
    if bmtrain := initialized_bmtrain():
        config = bmtrain.config
        if config["tp_size"] > 1 or config["pipe_enabled"]:
            raise ValueError(
                f"sequence parallelism does not go with BMTrain's tensor or pipeline parallelism yet: tp_size is "
                f"{config['tp_size']}, pipe_size {config['pipe_size']}"
            )
        return bmtrain_transport(config["comm"])
    if not dist.is_initialized():
        raise RuntimeError(
            "init_sequence_parallel needs bmtrain.init_distributed or torch.distributed.init_process_group to have "
            "been called"
        )
    return torch_transport(dist.group.WORLD)


def _ranks_a_host(hosts: Sequence[str], sp_size: int) -> int:
    """How many consecutive ranks of each sequence share a host, if that is everywhere the same; else sp_size."""
    sizes = set()
    for start in range(0, len(hosts), sp_size):
        runs = [(name, len(list(ranks))) for name, ranks in itertools.groupby(hosts[start : start + sp_size])]
        if len({name for name, _ in runs}) < len(runs):
            return sp_size  # ranks of a host are not consecutive
        sizes |= {size for _, size in runs}
    return sizes.pop() if len(sizes) == 1 else sp_size


def _own_group(world: Transport, partition: list[range]) -> Group:
    """Makes a group for each part, as every rank must, and returns the one that this rank is in."""
    if isinstance(world, BMTrainTransport):
        part = next(part for part in partition if world.rank in part)
        name = f"{world.name}/group/{next(_groups_made)}/{part.start}"
        transport = bmtrain_transport(new_communicator(name, part.index(world.rank), len(part)))
        transport.warm_up()
        return transport
    ranks = [list(part) for part in partition]
    if "nccl" not in dist.get_backend_config():
        return dist.new_subgroups_by_enumeration(ranks)[0]
    # Its kernels should start between those of the attention, not after them.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_subgroups_by_enumeration(ranks, backend="nccl", pg_options=options)[0]
