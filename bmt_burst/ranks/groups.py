"""Which ranks share a sequence, and the rings between them.

    sp = init_sequence_parallel(sp_size=4)        # after the one or the other's init, on every rank
    tokens, labels = sp.shard(tokens), sp.shard(shift_labels(tokens))
    positions = sp.positions(seq_len)
    out = burst_attn_func(q, k, v, causal=True, **sp.groups)

With documents, or a window, the work of the ranks depends on the mask, and a layout may be made for
it:

    mask = Mask.documents(cu_seqlens)
    sp = sp.with_layout(Layout.balanced(mask, sp.size))
    out = burst_attn_func(q, k, v, mask=mask, **sp.groups)

Consecutive ranks share a sequence: sequence parallel group i is ranks i * sp_size to (i + 1) *
sp_size - 1. Others may
with a DeviceMesh: init_sequence_parallel(mesh=mesh["sp"]).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.arguments import as_int, check_dim, check_tensor, to_python_int
from ..base.compiled import not_compiled
from ..errors import RanksDisagree
from ..sequence.layout import Layout, layout_class
from ..transport import ALONE, Transport
from ..transport.bmtrain import (
    BMTrainTransport,
    bmtrain_transport,
    initialized_bmtrain,
    new_communicator,
)
from ..transport.processes import host_name
from ..transport.torch_dist import torch_transport
from .agreement import admit_one_thread, gather_terms, read_terms, report_failure, run_together
from .rings import Group, Rings, check_device, check_member, make_rings

_groups_made = itertools.count()
_DOUBLE_RING = ("inter", "intra")  # names of the dimensions of a mesh
_ROWS_A_MESSAGE = 128  # of which a message holds the lengths, whatever they are


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among the ranks that share its sequence, and the layout of that sequence;
    by default alone.

    This is rank `rank` of `size`. `layout` is the name of one, for sequences of any length, or a
    Layout, for those of its length. `groups` are the keyword arguments that burst_attn_func takes
    to run over these ranks; init_sequence_parallel says in `made_for` how many ranks share a
    sequence and, in a double ring, a host.

    A copy by copy.copy or copy.deepcopy has the same groups. What is pickled, also with a module by
    torch.save, is the
    number of ranks and the layout: read in another process or on another rank, it has the groups
    and the rank that init_sequence_parallel last made there for so many ranks. Raises RuntimeError
    if it has made none, and TypeError when groups that it did not make are pickled.
    """

    rank: int = 0
    size: int = 1
    layout: str | Layout = "zigzag"
    process_group: Group | None = ALONE
    double_group: tuple[Group | None, Group | None] = (None, None)
    made_for: tuple[int, int | None] | None = field(default=None, repr=False, compare=False)

    def __copy__(self) -> SequenceParallel:
        return self

    def __deepcopy__(self, _memo) -> SequenceParallel:
        return self

    def __reduce__(self):
        if self.process_group is ALONE:
            return _find_groups, (1, None, self.layout)
        if self.made_for is None:
            raise TypeError(
                "groups that init_sequence_parallel did not make cannot be found again: not pickled"
            )
        return _find_groups, (*self.made_for, self.layout)

    @property
    def groups(self) -> dict[str, Any]:
        """process_group, double_group and layout, as keyword arguments of burst_attn_func."""
        return {
            "process_group": self.process_group,
            "double_group": self.double_group,
            "layout": self.layout,
        }

    def with_layout(self, layout: str | Layout) -> SequenceParallel:
        """The same ranks and groups with another layout.

        Raises ValueError for an unknown name or a layout of another number of ranks, TypeError for
        what is no layout.
        """
        if not isinstance(layout, Layout):
            layout_class(layout)
        elif layout.size != self.size:
            raise ValueError(f"a layout on {layout.size} ranks was given to {self.size}")
        return dataclasses.replace(self, layout=layout)

    def layout_of(self, seq_len: int) -> Layout:
        """How a sequence of `seq_len` tokens is cut over the ranks.

        Raises ValueError if it is too short, or of another length than the layout is for.
        """
        if not isinstance(self.layout, Layout):
            return Layout.named(self.layout, seq_len, self.size)
        if self.layout.seq_len != as_int("seq_len", seq_len):
            raise ValueError(
                f"the layout is for sequences of {self.layout.seq_len} tokens, got one of {seq_len}"
            )
        return self.layout

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """Global position ids of this rank's tokens of a sequence of `seq_len`: (S_local,) int64."""
        return self.layout_of(seq_len).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of `x`, which is whole and the same on every rank, cut along `dim`.
        Differentiable; a copy.

        Raises as `layout_of` for a number of entries that cannot be cut.
        """
        dim = check_dim(x, dim)
        return self.layout_of(x.shape[dim]).shard(x, self.rank, dim)

    @not_compiled
    def longest(self, positions: Tensor) -> Tensor:
        """One more than the largest position on any rank: of this rank's (S_local,) int64 (), of
        (B, S_local) (B,).

        The length that rotary scalings go by which depend on one. Every rank must call it with its
        part; a rank alone has nothing to ask. Where positions are on a GPU, the host waits for it.
        Raises on every rank if one has none, ValueError if they differ in B.
        """
        if self.size == 1:
            return positions.amax(-1) + 1
        rings = make_rings(self.process_group, self.double_group)
        mine = run_together(rings, "a call of longest", lambda: positions.amax(-1) + 1)
        rows, agreed = list(mine.shape), []
        for part in mine.reshape(-1).split(_ROWS_A_MESSAGE):
            terms = functools.partial(dict, rows=rows, lengths=part.tolist())
            said = read_terms(gather_terms(rings, "a call of longest", terms))
            for rank, theirs in enumerate(said):
                if theirs["rows"] != rows:
                    raise RanksDisagree(
                        f"ranks differ in rows: this one has {rows}, rank {rank} {theirs['rows']}"
                    )
            agreed.append(torch.tensor([theirs["lengths"] for theirs in said]).amax(0))
        return torch.cat(agreed).view(mine.shape).to(mine.device)

    @not_compiled
    def unshard(self, x: Tensor, seq_len: int, dim: int = 1) -> Tensor:
        """The whole of what `shard` cut, on every rank, without gradient; every rank must call it
        with its part `x`.

        Raises ValueError or TypeError on every rank if any rank's `x` is no tensor on a device of
        the group, does not have its number of a sequence of `seq_len` tokens, or ranks differ in
        layout, dtype or anything else.
        """
        rings = make_rings(self.process_group, self.double_group)
        with admit_one_thread(rings, "a call of unshard"):
            return self._unshard(rings, x, seq_len, dim)

    def _unshard(self, rings: Rings, x: Tensor, seq_len: int, dim: int) -> Tensor:
        def terms() -> dict[str, Any]:
            check_tensor("x", x)
            check_device(rings, x)
            at = check_dim(x, dim)
            layout = self.layout_of(seq_len)
            where = {"seq_len": layout.seq_len, "dim": at, "layout": layout.term}
            return {"shape": list(x.shape), "dtype": str(x.dtype), **where}

        everyone = read_terms(gather_terms(rings, "a call of unshard", terms))
        for rank, theirs in enumerate(everyone):
            if any(theirs[name] != everyone[0][name] for name in everyone[0].keys() - {"shape"}):
                raise RanksDisagree(
                    f"ranks differ in what they join: rank 0 has {everyone[0]}, rank {rank} {theirs}"
                )
        seq_len, dim = everyone[0]["seq_len"], everyone[0]["dim"]
        layout, shapes = self.layout_of(seq_len), [theirs["shape"] for theirs in everyone]
        for rank, shape in enumerate(shapes):
            expected = list(everyone[0]["shape"])
            expected[dim] = layout.length(rank)
            if shape != expected:
                raise RanksDisagree(
                    f"rank {rank}'s x is {shape}, of {seq_len} tokens along {dim} it should be {expected}"
                )
        with report_failure(rings, "a call of unshard"):
            mine = x.detach().resolve_conj().resolve_neg().contiguous()
            parts = rings.gather_tensors(mine, [torch.Size(shape) for shape in shapes])
        return layout.unshard(parts, dim)


# What init_sequence_parallel made last, by what it is made for, for as long as it is in use.
_made: weakref.WeakValueDictionary[tuple[int, int | None], SequenceParallel] = (
    weakref.WeakValueDictionary()
)


def _find_groups(size: int, inner_size: int | None, layout: str | Layout) -> SequenceParallel:
    """What was pickled of a SequenceParallel, with the groups of this process."""
    if size == 1:
        return SequenceParallel(layout=layout)
    if (size, inner_size) not in _made:
        name = "ulysses_size" if inner_size == 1 else "inner_size"
        call = f"init_sequence_parallel({size}{f', {name}={inner_size}' if inner_size else ''})"
        raise RuntimeError(
            f"this was saved by one of {size} ranks that shared sequences: before it is read, call {call}, or with a "
            "mesh of as many, and keep what it returns"
        )
    return dataclasses.replace(_made[size, inner_size], layout=layout)


def init_sequence_parallel(
    sp_size: int | None = None,
    *,
    layout: str = "zigzag",
    inner_size: int | None = None,
    ulysses_size: int | None = None,
    mesh: dist.DeviceMesh | None = None,
) -> SequenceParallel:
    """Makes the groups of sequence parallelism; every rank must call it, with one meaning.

    Over BMTrain's ranks after bmtrain.init_distributed, else over torch.distributed's.

    layout        the name of a layout, for all sequences; `with_layout` gives one of them another
    sp_size       ranks that share a sequence, by default all; must divide the world size
    inner_size    ranks of a host, for the double ring; must divide sp_size. By default as the ranks
                  lie on hosts: a double ring if each sequence has the same number on each of
                      several hosts, else a single one.
    ulysses_size  for strategy "usp", instead of inner_size: how many consecutive ranks share heads;
                  the others of a sequence are rings. By default those of a host, as above.
    mesh          instead of sizes: a DeviceMesh of this rank, whose ranks share a sequence and
                  whose groups are taken. Of one dimension, as init_device_mesh("cuda", (dp, sp),
                  mesh_dim_names=("dp", "sp"))["sp"], it is a single ring, on however many hosts. Of
                  two, named ("inter", "intra"), it is a double ring: the first dimension counts
                  hosts, the second the ranks of a host (or, for "usp", those that share heads);
                  rank = inter * (size of intra) + intra.

    Raises, on every rank, ValueError where a size does not divide, the layout is unknown, ranks
    differ, a mesh is given with a size or has other dimensions, a rank is not in its mesh, a rank's
    mesh has ranks that give another one, or BMTrain runs with tensor or pipeline parallelism or a
    mesh; TypeError for a size that is no whole number or what is no mesh (where that is so;
    ValueError elsewhere); RuntimeError if neither BMTrain nor torch.distributed is initialised.
    """
    world = _find_world()
    sp_size, inner_size = (
        world.size if sp_size is None and mesh is None else to_python_int(sp_size),
        to_python_int(inner_size),
    )
    ulysses_size = to_python_int(ulysses_size)
    sizes = f"sp_size={sp_size!r}, inner_size={inner_size!r}, ulysses_size={ulysses_size!r}"
    arguments = f"{sizes}, layout={layout!r}{', a mesh' * (mesh is not None)}".encode(
        "ascii", "replace"
    )[:300]
    replies = world.gather(json.dumps([arguments.decode(), host_name().decode()]).encode())
    calls, hosts = zip(*map(json.loads, replies), strict=True)
    if len(set(calls)) > 1:
        raise RanksDisagree(f"ranks differ in init_sequence_parallel's arguments: {list(calls)}")
    if mesh is not None:
        if any(size is not None for size in (sp_size, inner_size, ulysses_size)):
            raise ValueError("a mesh says which ranks share a sequence: no size goes with it")
        return _take_mesh_groups(world, mesh, layout)
    sp_size = as_int("sp_size", sp_size)
    if sp_size < 1 or world.size % sp_size:
        raise ValueError(f"sp_size={sp_size} does not divide the world of {world.size} ranks")
    if inner_size is not None and ulysses_size is not None:
        raise ValueError(
            "inner_size and ulysses_size both say which ranks are a group: give one of them"
        )
    name = "inner_size" if ulysses_size is None else "ulysses_size"
    asked = inner_size if ulysses_size is None else ulysses_size
    inner_size = _count_ranks_a_host(hosts, sp_size) if asked is None else as_int(name, asked)
    if inner_size < 1 or sp_size % inner_size:
        raise ValueError(f"{name}={inner_size} does not divide sp_size={sp_size}")
    layout_class(layout)  # refuses an unknown name now
    rank = world.rank % sp_size
    sequences = [range(start, start + sp_size) for start in range(0, world.size, sp_size)]
    if sp_size == 1:
        return SequenceParallel(layout=layout)
    if inner_size == 1 and ulysses_size is not None:
        ring = make_group(world, sequences)
        made_for, groups = (sp_size, 1), {"process_group": None, "double_group": (ALONE, ring)}
    elif inner_size in (1, sp_size):
        made_for, groups = (sp_size, None), {"process_group": make_group(world, sequences)}
    else:
        by_host = [
            ranks[i : i + inner_size] for ranks in sequences for i in range(0, sp_size, inner_size)
        ]
        by_place = [ranks[i::inner_size] for ranks in sequences for i in range(inner_size)]
        double_group = make_group(world, by_host), make_group(world, by_place)
        made_for, groups = (
            (sp_size, inner_size),
            {"process_group": None, "double_group": double_group},
        )
    sp = SequenceParallel(rank, sp_size, layout, **groups, made_for=made_for)
    _made[made_for] = sp
    return sp


def _take_mesh_groups(world: Transport, mesh: dist.DeviceMesh, layout: str) -> SequenceParallel:
    """The ranks of this rank's mesh, once each rank has one that all in it agree on."""
    if isinstance(world, BMTrainTransport):
        raise ValueError(
            "a mesh is of torch.distributed's ranks: with BMTrain give sp_size and inner_size"
        )

    def terms() -> dict[str, Any]:
        layout_class(layout)
        _check_mesh(mesh)
        ranks = repr(mesh.mesh.tolist())
        return {
            "ranks": ranks[:200],
            "size": mesh.size(),
            "digest": hashlib.sha256(ranks.encode()).hexdigest(),
        }

    said = gather_terms(Rings(world, ALONE), "init_sequence_parallel of a mesh", terms)
    everyone, alike = read_terms(said), Counter(said)
    for rank, (line, theirs) in enumerate(zip(said, everyone, strict=True)):
        # each is in its own mesh: where as many as that has say the same, it is they
        if alike[line] != theirs["size"]:
            given = f"rank {rank} gives the ranks {theirs['ranks']}, as {alike[line]} of {theirs['size']} ranks do"
            raise RanksDisagree(f"ranks differ in their meshes: {given}")
        if theirs["size"] != everyone[0]["size"]:
            sizes = f"rank 0 gives one of {everyone[0]['size']} ranks, rank {rank} one of {theirs['size']}"
            raise RanksDisagree(f"ranks differ in the size of their meshes: {sizes}")
    outer, inner = (1, *mesh.shape)[-2:]
    host, place = (0, *mesh.get_coordinate())[-2:]
    if mesh.size() == 1:
        return SequenceParallel(layout=layout)
    if outer == 1 or inner == 1:
        made_for, groups = (
            (mesh.size(), None),
            {"process_group": mesh.get_group(0 if inner == 1 else mesh.ndim - 1)},
        )
    else:
        made_for = mesh.size(), inner
        groups = {
            "process_group": None,
            "double_group": (mesh.get_group("intra"), mesh.get_group("inter")),
        }
    sp = SequenceParallel(host * inner + place, mesh.size(), layout, **groups, made_for=made_for)
    _made[made_for] = sp
    return sp


def _check_mesh(mesh: Any) -> None:
    """Raises TypeError for no DeviceMesh, ValueError for one of other dimensions or that this rank
    is not in.
    """
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if mesh.ndim != 1 and names != _DOUBLE_RING:
        hint = f": give mesh[{names[-1]!r}]" if names else ""
        expected = f"mesh must have one dimension, or two named {_DOUBLE_RING} for a double ring"
        raise ValueError(f"{expected}, got {mesh.ndim} named {names}{hint}")
    check_member(mesh)


def _find_world() -> Transport:
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


def _count_ranks_a_host(hosts: Sequence[str], sp_size: int) -> int:
    """How many consecutive ranks of each sequence share a host, if that is everywhere the same;
    else sp_size.
    """
    sizes = set()
    for start in range(0, len(hosts), sp_size):
        runs = [
            (name, len(list(ranks)))
            for name, ranks in itertools.groupby(hosts[start : start + sp_size])
        ]
        if len({name for name, _ in runs}) < len(runs):
            return sp_size  # ranks of a host are not consecutive
        sizes |= {size for _, size in runs}
    return sizes.pop() if len(sizes) == 1 else sp_size


def make_group(world: Transport, partition: list[range]) -> Group:
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
