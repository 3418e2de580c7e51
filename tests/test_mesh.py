"""DeviceMesh: as a group of a call and in init_sequence_parallel, on gloo ranks."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from bmt_burst import Layout, Mask, SequenceParallel, burst_attn_func, init_sequence_parallel, nn
from bmt_burst.ranks.sequence_parallel import DetachedGroups
from tests.cases import random_qkv
from tests.launcher import run_in_turn
from tests.reference import dense_results, relative_error
from tests.rings import worst_rank_error

TOKENS = 37


def error(rank: int, sp: SequenceParallel, groups: dict) -> float:
    """Return the worst error of this rank's part of causal attention over the ranks of `groups`."""
    tensors = random_qkv(1, TOKENS, 4, 2, 8, seed=rank)
    exact = dense_results(Mask.causal(TOKENS), tensors, 0.3)
    layout = Layout.named(sp.layout, TOKENS, sp.size)
    return worst_rank_error(sp.rank, layout, tensors, exact, 0.3, causal=True, **groups)


def groups_of_calls(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    one, double = SequenceParallel(rank % 2, 2), SequenceParallel(rank, 4)
    with pytest.raises(
        ValueError, match=r"one dimension of a DeviceMesh, got \('inter', 'intra'\)"
    ):
        burst_attn_func(*random_qkv(1, 4, 2, 2, 8)[:3], process_group=mesh)
    with pytest.raises(ValueError, match=r"expected a DeviceMesh with rank \d, got \[\d, \d\]"):
        others = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        burst_attn_func(*random_qkv(1, 4, 2, 2, 8)[:3], process_group=others[rank < 2])
    return [
        error(rank // 2, one, {"process_group": mesh["intra"]}),
        error(0, double, {"double_group": (mesh["intra"], mesh["inter"])}),
        error(0, double, pairs_of_groups(rank, mesh)),
    ]


def pairs_of_groups(rank: int, mesh: DeviceMesh) -> dict:
    """Return a double ring as the official package takes it, and check which pairs are refused."""
    again = [dist.new_group(x) for x in ([0, 1], [2, 3])]
    others = [dist.new_group(x) for x in ([0, 2], [1, 3])]
    intra, inter = mesh["intra"], mesh["inter"].get_group()
    start = rank // 2 * 2
    other = others[rank % 2]
    ranks = dist.get_process_group_ranks(other)
    wrong = (
        rf"of intra to have .*, got ranks \[{start}, {start + 1}\] and \[{ranks[0]}, {ranks[1]}\]"
    )
    with pytest.raises(ValueError, match=wrong):
        burst_attn_func(*random_qkv(1, 4, 2, 2, 8)[:3], double_group=((intra, other), inter))
    return {"double_group": [(intra, again[rank // 2]), (inter, other)]}


def sequences_of_meshes(rank: int) -> list[float]:
    """Calls on ranks that share a sequence by a mesh: their places; they are found again."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    strided = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp"))
    flat = init_device_mesh("cpu", (4,))
    hosts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "inter", "intra"))
    errors = []
    for mesh, place, size, sequence in (
        (grid["sp"], rank % 2, 2, rank // 2),
        (strided["sp"], rank // 2, 2, rank % 2),
        (flat, rank, 4, 0),
        (hosts, rank, 4, 0),
        (cube["inter", "intra"], rank, 4, 0),
    ):
        sp = init_sequence_parallel(mesh=mesh, layout="striped")
        assert (sp.rank, sp.size, sp.layout) == (place, size, "striped")
        assert (sp.process_group is None) == (mesh.ndim == 2)
        errors.append(error(sequence, sp, sp.groups))
        if mesh.ndim == 2:
            errors.append(error(sequence, sp, sp.groups | {"strategy": "usp"}))
        x = torch.arange(2 * TOKENS).view(2, TOKENS) + sequence
        assert sp.unshard(sp.shard(x), TOKENS).equal(x)
        assert copy.deepcopy(sp) == sp
        assert repr(pickle.loads(pickle.dumps(sp))) == f"DetachedGroups({sp.size})"
    assert sp.double_group == (cube["intra"].get_group(), cube["inter"].get_group())
    for shape in ((1, 4), (4, 1)):  # hosts or ranks of a host, but not both: a single ring
        sp = init_sequence_parallel(
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=("inter", "intra"))
        )
        assert (sp.rank, sp.size, sp.process_group.size()) == (rank, 4, 4)
        errors.append(error(0, sp, sp.groups))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "sp"))["sp"]
    assert init_sequence_parallel(mesh=alone) == SequenceParallel()
    return errors


def sharded_training(rank: int) -> float:
    """The error of FSDP2's gradient over all ranks, which share sequences over a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    sp = init_sequence_parallel(mesh=mesh["sp"])

    def layer(sp):
        torch.manual_seed(0)
        return nn.BurstAttention(32, 4, num_kv_heads=2, sp=sp).double()

    x = [
        torch.randn(1, TOKENS, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    cos, sin = (table.double() for table in nn.rope_tables(torch.arange(TOKENS), 8))
    alone = layer(SequenceParallel())
    sum(alone(each, cos, sin).sin().sum() for each in x).backward()
    model = layer(sp)
    fully_shard(model, mesh=mesh["dp", "sp"]._flatten())
    model(sp.shard(x[rank // 2]), sp.shard(cos, 0), sp.shard(sin, 0)).sin().sum().backward()
    saved = io.BytesIO()
    torch.save(sp, saved)
    saved.seek(0)
    assert isinstance(torch.load(saved, weights_only=False), DetachedGroups)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(relative_error(4 * mine.grad.full_tensor(), other.grad) for mine, other in pairs)


def misuse(rank: int) -> None:
    """Check the errors of this rank, one after the other over the same world."""
    flat, pair = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [[0, 1], [2, 3]])
    pairs = {
        ranks: DeviceMesh("cpu", list(ranks))
        for ranks in ((0, 1), (2, 3), (1, 0), (1, 2), (2,), (3,))
    }
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    own = pairs[(0, 1) if rank < 2 else (2, 3)]
    both = "expected a mesh or sizes, got both: a mesh has a size"
    differ = "ranks differ in their meshes: rank 0's mesh has ranks [0, 1], but 1 of these 2 passed"
    sizes = "ranks differ in the size of their meshes: rank 0 has 2 ranks, rank 2 has 1"
    two = "mesh must have one dimension, or two named ('inter', 'intra') for a double ring, got 2 "
    told = "rank 2 of the group failed before init_sequence_parallel of a mesh: "
    outside = f"expected a DeviceMesh with rank {max(rank, 2)}, got [0, 1]"
    outside = f"{told}ValueError: {outside}" if rank < 2 else outside
    wrong = "mesh must be a DeviceMesh, got ProcessGroup"
    wrong = wrong if rank == 2 else f"{told}TypeError: {wrong}"
    for arguments, message in (
        ({"mesh": flat, "sp_size": 4}, both),
        ({"mesh": flat, "inner_size": 2}, both),
        ({"mesh": own, "ulysses_size": 2}, both),
        ({"mesh": own if rank else None}, "ranks differ in mesh of init_sequence_parallel: "),
        ({"mesh": pairs[0, 1]}, outside),
        ({"mesh": pairs[[(0, 1), (1, 0), (2, 3), (2, 3)][rank]]}, differ),
        ({"mesh": pairs[[(0, 1), (1, 2), (1, 2), (3,)][rank]]}, differ),
        ({"mesh": pairs[[(0, 1), (0, 1), (2,), (3,)][rank]]}, sizes),
        ({"mesh": grid}, f"{two}named ('dp', 'sp'): pass mesh['sp']"),
        ({"mesh": pair}, f"{two}named None"),
        ({"mesh": own.get_group() if rank == 2 else own}, wrong),
        ({"mesh": own, "layout": "ring"}, "unknown layout 'ring'"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            init_sequence_parallel(**arguments)
        assert str(caught.value).startswith(message)
    assert init_sequence_parallel(mesh=own).size == 2  # the world is still in order


@pytest.fixture(scope="module")
def found() -> list[list]:
    """What four ranks find in each of their works."""
    return run_in_turn(4, groups_of_calls, sequences_of_meshes, sharded_training, misuse)


def test_dimensions_of_a_mesh_are_groups_of_a_call(found):
    assert max(map(max, found[0])) < 1e-12


def test_a_mesh_makes_a_sequence_parallel(found):
    assert max(map(max, found[1])) < 1e-12


def test_fsdp2_goes_with_the_same_mesh(found):
    assert max(found[2]) < 1e-12
