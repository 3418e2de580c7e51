"""The ranks that share a sequence, and the groups between them.

Consecutive ranks share a sequence: sequence parallel group i is ranks i * sp_size to (i + 1) *
sp_size - 1. For other ranks pass a DeviceMesh: init_sequence_parallel(mesh=mesh["sp"]).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base.arguments import as_float, as_int
from ..errors import RanksDisagree
from ..sequence.layout import layout_class
from ..transport import ALONE
from ..transport.bmtrain import BMTrainTransport, bmtrain_transport, initialized_bmtrain
from ..transport.processes import ProcessTransport
from ..transport.sockets import host_name
from ..transport.torch_dist import TorchTransport, torch_transport, world_group
from .agreement import admit_one_thread, agree, gather_terms, read_terms
from .rings import Group, Rings, check_member
from .sequence_parallel import SequenceParallel

_LONGEST_TIMEOUT = 1e8  # seconds; longer ones overflow timers
_DOUBLE_RING = ("inter", "intra")  # names of the dimensions of a mesh


def init_sequence_parallel(
    sp_size: int | None = None,
    *,
    layout: str = "zigzag",
    inner_size: int | None = None,
    ulysses_size: int | None = None,
    mesh: dist.DeviceMesh | None = None,
    timeout: float | None = None,
) -> SequenceParallel:
    """Make the groups of sequence parallelism. Every rank must call it, with the same arguments.

    It uses BMTrain's ranks after bmtrain.init_distributed, otherwise torch.distributed's.

    sp_size       the number of ranks that share a sequence, by default all. It must divide the
                  world size.
    layout        the name of a layout, for all sequences
    inner_size    ranks of a host, for the double ring. It must divide sp_size. By default a double
                  ring is made if each sequence has the same number of ranks on each of several
                  hosts, otherwise a single ring.
    ulysses_size  for strategy "usp", instead of inner_size: how many consecutive ranks share heads,
                  by default those of a host. The rings are between the others of a sequence.
    mesh          instead of sizes: a DeviceMesh of the ranks that share a sequence, with groups. A
                  mesh of one dimension is a single ring, for example init_device_mesh("cuda",
                  (dp, sp), mesh_dim_names=("dp", "sp"))["sp"]. A mesh of two dimensions named
                  ("inter", "intra") is a double ring: the first counts hosts, the second the ranks
                  of a host (for "usp", the ranks that share heads), and rank = inter * (size of
                  intra) + intra.
    timeout       seconds to wait for a rank that does not make a call, in this call and all later
                  ones over these groups or over all ranks. It is the own timeout of the groups that
                  this call makes, and of the mesh's, unless that is the group of all ranks. By
                  default the timeout of the earlier call, or else of init_process_group (120 on
                  BMTrain). A mesh with a timeout other than torch's default keeps it then. NCCL
                  counts from when a host enqueues work, so exceed the longest work enqueued ahead.

    Raises, on every rank:

    - ValueError if a size does not divide, the layout is unknown, the timeout is shorter than a
      millisecond or longer than 1e8 seconds, a mesh is given with a size or has other dimensions, a
      rank is not in its mesh, or BMTrain runs with tensor or pipeline parallelism or with a mesh
    - RanksDisagree, a ValueError, if ranks differ in arguments or meshes
    - TypeError for a size that is no whole number, a timeout that is no number, or a mesh that
      is not a DeviceMesh (on other ranks RanksDisagree)
    - RuntimeError if neither BMTrain nor torch.distributed is initialised
    """
    world = _find_world()
    earlier = world.asked_timeout
    timeout = earlier if timeout is None else timeout
    sp_size = world.size if sp_size is None and mesh is None else sp_size
    sizes = {"sp_size": sp_size, "inner_size": inner_size, "ulysses_size": ulysses_size}
    try:
        with admit_one_thread(Rings(world, ALONE), "init_sequence_parallel"):
            return _agree_on_groups(world, sizes, layout, mesh, timeout)
    except BaseException:
        world.set_timeout(earlier)
        raise


def _agree_on_groups(
    world: ProcessTransport,
    sizes: dict[str, int | None],
    layout: str,
    mesh: dist.DeviceMesh | None,
    timeout: float | None,
) -> SequenceParallel:
    """Make the groups once all ranks have passed the same arguments."""

    def terms() -> dict[str, Any]:
        seconds = None if timeout is None else as_float("timeout", timeout)
        if seconds is not None and not 1e-3 <= seconds <= _LONGEST_TIMEOUT:
            raise ValueError(f"timeout: expected 0.001 to 1e8 seconds, got {timeout}")
        world.set_timeout(seconds)
        layout_class(layout)  # refuses an unknown name
        given = {name: size if size is None else as_int(name, size) for name, size in sizes.items()}
        facts = {"layout": layout, "timeout": seconds, "host": host_name().decode()}
        return {"mesh": mesh is not None, **given, **facts}

    everyone = agree(Rings(world, ALONE), "init_sequence_parallel", terms, but=["host"])
    if mesh is not None:
        if any(size is not None for size in sizes.values()):
            raise ValueError("expected a mesh or sizes, got both: a mesh has a size")
        return _take_mesh_groups(world, mesh, layout)
    sp_size, inner_size, ulysses_size = (everyone[0][name] for name in sizes)
    assert sp_size is not None, "set above"
    if sp_size < 1 or world.size % sp_size:
        raise ValueError(f"sp_size={sp_size} does not divide the world of {world.size} ranks")
    if inner_size is not None and ulysses_size is not None:
        raise ValueError("expected inner_size or ulysses_size, got both: each cuts a sequence")
    name, inner = "inner_size", inner_size
    if ulysses_size is not None:
        name, inner = "ulysses_size", ulysses_size
    if inner is None:
        inner = _count_ranks_a_host([theirs["host"] for theirs in everyone], sp_size)
    if inner < 1 or sp_size % inner:
        raise ValueError(f"{name}={inner} does not divide sp_size={sp_size}")
    if sp_size == 1:
        return SequenceParallel(layout=layout)
    place = world.rank % sp_size, sp_size, layout
    sequences, by_host, by_place = cut_world(world.size, sp_size, inner)
    if inner == 1 and ulysses_size is not None:
        return SequenceParallel(*place, None, (ALONE, make_group(world, sequences)))
    if inner in (1, sp_size):
        return SequenceParallel(*place, make_group(world, sequences))
    double_group = make_group(world, by_host), make_group(world, by_place)
    return SequenceParallel(*place, None, double_group)


def _take_mesh_groups(
    world: ProcessTransport, mesh: dist.DeviceMesh, layout: str
) -> SequenceParallel:
    """Return the ranks of this rank's mesh, once all ranks in each mesh agree on it."""
    if isinstance(world, BMTrainTransport):
        raise ValueError("expected sizes on BMTrain, got a mesh, which has torch's ranks")

    def terms() -> dict[str, Any]:
        _check_mesh(mesh)
        ranks = repr(mesh.mesh.tolist())
        digest = hashlib.sha256(ranks.encode()).hexdigest()
        return {"ranks": ranks[:200], "size": mesh.size(), "digest": digest}

    lines = gather_terms(Rings(world, ALONE), "init_sequence_parallel of a mesh", terms)
    everyone, counts = read_terms(lines), Counter(lines)
    for rank, (line, theirs) in enumerate(zip(lines, everyone, strict=True)):
        # Each rank is in its mesh. So if as many ranks passed a mesh as it has, all of its ranks
        # passed it.
        if counts[line] != theirs["size"]:
            mesh_of = f"rank {rank}'s mesh has ranks {theirs['ranks']}"
            passed = f"{counts[line]} of these {theirs['size']} passed it"
            raise RanksDisagree(f"ranks differ in their meshes: {mesh_of}, but {passed}")
        if theirs["size"] != everyone[0]["size"]:
            sizes = f"rank 0 has {everyone[0]['size']} ranks, rank {rank} has {theirs['size']}"
            raise RanksDisagree(f"ranks differ in the size of their meshes: {sizes}")
    outer, inner = (1, *mesh.shape)[-2:]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in its mesh"
    host, place = (0, *coordinate)[-2:]
    if mesh.size() == 1:
        return SequenceParallel(layout=layout)
    sp = SequenceParallel(host * inner + place, mesh.size(), layout, None)
    if outer == 1 or inner == 1:
        sp = replace(sp, process_group=mesh.get_group(0 if inner == 1 else mesh.ndim - 1))
    else:
        sp = replace(sp, double_group=(mesh.get_group("intra"), mesh.get_group("inter")))
    for ring in sp.rings.shared:
        # torch makes a mesh's groups with its default, which that of init_process_group replaces
        assert isinstance(world, TorchTransport) and isinstance(ring, TorchTransport), "of a mesh"
        timeout = world.asked_timeout
        if timeout is None and ring.has_default_timeout and not world.has_default_timeout:
            timeout = world.own_timeout
        if timeout is not None:
            ring.set_group_timeout(timeout)
    return sp


def _check_mesh(mesh: Any) -> None:
    """Raise TypeError or ValueError unless this is a DeviceMesh of this rank that makes rings."""
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if mesh.ndim != 1 and names != _DOUBLE_RING:
        hint = f": pass mesh[{names[-1]!r}]" if names else ""
        expected = f"mesh must have one dimension, or two named {_DOUBLE_RING} for a double ring"
        raise ValueError(f"{expected}, got {mesh.ndim} named {names}{hint}")
    check_member(mesh)


def _find_world() -> ProcessTransport:
    """Return all ranks, of BMTrain or torch.distributed."""
    if bmtrain := initialized_bmtrain():
        config = bmtrain.config
        if config["tp_size"] > 1 or config["pipe_enabled"]:
            got = f"tp_size={config['tp_size']} and pipe_size={config['pipe_size']}"
            raise ValueError(f"expected BMTrain without tensor and pipeline parallelism, got {got}")
        return bmtrain_transport(config["comm"])
    if not dist.is_initialized():
        starts = "bmtrain.init_distributed or torch.distributed.init_process_group"
        raise RuntimeError(f"call {starts} before init_sequence_parallel")
    return torch_transport(world_group())


def _count_ranks_a_host(hosts: Sequence[str], sp_size: int) -> int:
    """Return how many consecutive ranks of each sequence share a host, or sp_size if it varies."""
    sizes = set()
    for start in range(0, len(hosts), sp_size):
        names = hosts[start : start + sp_size]
        runs = [len(list(ranks)) for _, ranks in itertools.groupby(names)]
        if len(set(names)) < len(runs):
            return sp_size  # ranks of a host are not consecutive
        sizes |= set(runs)
    return sizes.pop() if len(sizes) == 1 else sp_size


def cut_world(size: int, sp_size: int, inner: int) -> tuple[list[range], list[range], list[range]]:
    """Return the ranks of each sequence, of its runs of `inner` ranks, and of places in runs."""
    sequences = [range(start, start + sp_size) for start in range(0, size, sp_size)]
    runs = [ranks[i : i + inner] for ranks in sequences for i in range(0, sp_size, inner)]
    return sequences, runs, [ranks[i::inner] for ranks in sequences for i in range(inner)]


def make_group(world: ProcessTransport, partition: list[range]) -> Group:
    """Make a group for each part, as every rank must. Return that of this rank."""
    if isinstance(world, BMTrainTransport):
        return world.make_group(partition)
    timeout = timedelta(seconds=world.messenger.timeout)  # torch would take its own default
    options: dict[str, Any] = {"timeout": timeout}
    if "nccl" in dist.get_backend_config():
        # NCCL's kernels should start between the kernels of attention, not after them.
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        nccl._timeout = timeout  # torch warns of two timeouts
        options |= {"backend": "nccl", "pg_options": nccl}
    return dist.new_subgroups_by_enumeration([*map(list, partition)], **options)[0]
