"""The groups of ranks that share a sequence in two ways at once, by Ulysses and by a ring."""

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

# Whether packages are installed. Kernels do not depend on it here: they are chosen as flash="auto"
# chooses them.
HAS_FLASH_ATTN = find_spec("flash_attn") is not None
HAS_FLASH_ATTN_HOPPER = find_spec("flash_attn_interface") is not None
HAS_FLASHINFER = find_spec("flashinfer") is not None
HAS_AITER = find_spec("aiter") is not None
HAS_SAGE_ATTENTION = find_spec("sageattention") is not None
HAS_SPARSE_SAGE_ATTENTION = find_spec("spas_sage_attn") is not None
HAS_NPU = find_spec("torch_npu") is not None


@dataclass
class ProcessGroups:
    """The groups that this rank is in, once set_seq_parallel_pg has made them.

    ULYSSES_PG   ranks that have different heads once they have exchanged tokens
    RING_PG      ranks that have the same heads of different tokens
    SEQUENCE_PG  all that share the sequence: the product of the two; yunchang has no such group
    ULYSSES_LOW  whether consecutive ranks are a Ulysses group, not a ring
    """

    ULYSSES_PG: dist.ProcessGroup | None = None
    RING_PG: dist.ProcessGroup | None = None
    SEQUENCE_PG: dist.ProcessGroup | None = None
    ULYSSES_LOW: bool = True


PROCESS_GROUP = ProcessGroups()


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
) -> None:
    """Makes the groups in PROCESS_GROUP; every rank must call it, with one meaning, after
    init_process_group.

    Consecutive ranks, sp_ulysses_degree * sp_ring_degree of them, share a sequence. Of these
    consecutive ones are a Ulysses group, or a ring without use_ulysses_low.

    Raises, on every rank, ValueError where the degrees do not divide the world, rank and world_size
    are not torch.distributed's, or ranks differ; TypeError for what is no whole number (where that
    is so; ValueError elsewhere); RuntimeError before init_process_group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "set_seq_parallel_pg needs torch.distributed.init_process_group to have been called"
        )
    world = torch_transport(dist.group.WORLD)

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
    apart = [ranks[i::inner] for ranks in sequences for i in range(inner)]
    groups = make_group(world, consecutive), make_group(world, apart)
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = groups if low else groups[::-1]
    PROCESS_GROUP.SEQUENCE_PG, PROCESS_GROUP.ULYSSES_LOW = make_group(world, sequences), low


def _check_world(ulysses: int, ring: int, rank: int, world_size: int) -> None:
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank {rank} of {world_size} was given, torch.distributed has {dist.get_rank()} of {dist.get_world_size()}"
        )
    if min(ulysses, ring) < 1 or world_size % (ulysses * ring):
        raise ValueError(
            f"degrees of {ulysses} x {ring} ranks do not divide the world of {world_size}"
        )
