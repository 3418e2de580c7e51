"""The groups of ranks that share a sequence, by Ulysses and by a ring at once."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from ...base.arguments import as_bool, as_int
from ...errors import RanksDisagree
from ...ranks.agreement import gather_terms, read_terms
from ...ranks.groups import make_group
from ...ranks.rings import Rings
from ...transport import ALONE
from ...transport.torch_dist import torch_transport

# Whether packages are installed. Kernels are chosen as flash="auto" chooses them, whatever this is.
HAS_FLASH_ATTN = find_spec("flash_attn") is not None
HAS_FLASH_ATTN_HOPPER = find_spec("flash_attn_interface") is not None
HAS_FLASHINFER = find_spec("flashinfer") is not None
HAS_AITER = find_spec("aiter") is not None
HAS_SAGE_ATTENTION = find_spec("sageattention") is not None
HAS_SPARSE_SAGE_ATTENTION = find_spec("spas_sage_attn") is not None
HAS_NPU = find_spec("torch_npu") is not None


@dataclass
class ProcessGroups:
    """The groups of this rank, after set_seq_parallel_pg.

    ULYSSES_PG   ranks that exchange tokens for heads
    RING_PG      ranks that have the same heads of different tokens
    SEQUENCE_PG  all ranks that share the sequence, the product of the two; yunchang has none
    ULYSSES_LOW  consecutive ranks are a Ulysses group, not a ring
    """

    ULYSSES_PG: dist.ProcessGroup | None = None
    RING_PG: dist.ProcessGroup | None = None
    SEQUENCE_PG: dist.ProcessGroup | None = None
    ULYSSES_LOW: bool = True


PROCESS_GROUP = ProcessGroups()


@dataclass(frozen=True)
class Grid:
    """The ranks that share a sequence: a ring of degree `ring` times Ulysses of degree `ulysses`.

    ulysses_low  consecutive ranks are a Ulysses group, not a ring
    """

    sequence: dist.ProcessGroup
    ulysses: int
    ring: int
    ulysses_low: bool


def current_grid() -> Grid:
    """Return the grid that PROCESS_GROUP describes. Raises RuntimeError before
    set_seq_parallel_pg.
    """
    made = PROCESS_GROUP
    if made.SEQUENCE_PG is None or made.ULYSSES_PG is None or made.RING_PG is None:
        raise RuntimeError("call set_seq_parallel_pg first: it makes the groups of ranks")
    return Grid(made.SEQUENCE_PG, made.ULYSSES_PG.size(), made.RING_PG.size(), made.ULYSSES_LOW)


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
) -> None:
    """Make the groups in PROCESS_GROUP. Every rank must call it after init_process_group, with the
    same degrees.

    Each sp_ulysses_degree * sp_ring_degree consecutive ranks share a sequence. Among them
    consecutive ranks are a Ulysses group, or with use_ulysses_low=False a ring.

    Raises on every rank ValueError if the world does not divide by the degrees, if rank and
    world_size are not torch.distributed's, or if ranks differ. A degree that is not a whole number
    raises TypeError on its rank and ValueError on the others. Raises RuntimeError before
    init_process_group.
    """
    world_group = dist.group.WORLD
    if world_group is None:
        raise RuntimeError("call torch.distributed.init_process_group before set_seq_parallel_pg")
    world = torch_transport(world_group)

    def terms() -> dict[str, Any]:
        given = {
            "sp_ulysses_degree": as_int("sp_ulysses_degree", sp_ulysses_degree),
            "sp_ring_degree": as_int("sp_ring_degree", sp_ring_degree),
            "use_ulysses_low": as_bool("use_ulysses_low", use_ulysses_low),
        }
        _check_world(given["sp_ulysses_degree"], given["sp_ring_degree"], rank, world_size)
        return given

    first, *others = read_terms(gather_terms(Rings(world, ALONE), "set_seq_parallel_pg", terms))
    for other, given in enumerate(others, 1):
        if given != first:
            raise RanksDisagree(
                f"ranks differ in set_seq_parallel_pg: rank 0 has {first}, rank {other} has {given}"
            )
    ulysses, ring, low = (
        first[name] for name in ("sp_ulysses_degree", "sp_ring_degree", "use_ulysses_low")
    )
    size = ulysses * ring
    sequences = [range(start, start + size) for start in range(0, world_size, size)]
    inner = ulysses if low else ring
    consecutive = [ranks[i : i + inner] for ranks in sequences for i in range(0, size, inner)]
    strided = [ranks[i::inner] for ranks in sequences for i in range(inner)]
    groups = make_group(world, consecutive), make_group(world, strided)
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = groups if low else groups[::-1]
    PROCESS_GROUP.SEQUENCE_PG, PROCESS_GROUP.ULYSSES_LOW = make_group(world, sequences), low


def _check_world(ulysses: int, ring: int, rank: int, world_size: int) -> None:
    own = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != own:
        raise ValueError(
            f"expected rank {own[0]} of {own[1]}, as torch.distributed has it, "
            f"got rank {rank} of {world_size}"
        )
    if min(ulysses, ring) < 1 or world_size % (ulysses * ring):
        raise ValueError(
            f"the world of {world_size} ranks does not divide by {ulysses} x {ring} ranks"
        )
