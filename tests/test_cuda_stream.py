"""Copies of regions: which bytes they move, in how many of the driver's calls, and that the driver
gets them as its documentation says. A driver of CPU memory stands for CUDA's.
"""

import ctypes
import itertools
import random

import pytest
import torch

from bmt_burst.transport import cuda_stream
from bmt_burst.transport.copy_engine import _BYTES, _EXAMPLES
from bmt_burst.transport.cuda_stream import CudaEvents, CudaStream, make_launches
from bmt_burst.transport.regions import Copy, Region, find_bytes


class Driver:
    """The functions of libcuda on the CPU's memory. `calls` are their names, in order."""

    def __init__(self):
        self.calls = []
        self.events = itertools.count(1)
        self.refused = None  # bytes of copies that fail

    def cuMemcpyDtoDAsync_v2(self, target, source, nbytes, stream):
        self.calls.append("1D")
        ctypes.memmove(target, source, nbytes)
        return 0

    def cuMemcpyBatchAsync(
        self, targets, sources, sizes, count, attributes, first, kinds, failed, stream
    ):
        """Read arrays of `count` words. All copies have the one CUmemcpyAttributes of three
        words: the order of the stream, and no hints.
        """
        self.calls.append(f"{count} x 1D")
        assert (kinds, *first, *read_words(attributes, 3)) == (1, 0, 1, 0, 0)
        for index, copy in enumerate(zip(targets, sources, sizes, strict=True)):
            if copy[2] == self.refused:
                failed[0] = index
                return 700
            ctypes.memmove(*copy)
        return 0

    def cuMemcpy2DAsync_v2(self, pointer, stream):
        """Read CUDA_MEMCPY2D as sixteen words: x, y, type, host, device, array, pitch of the
        source, the same of the target, then width and height.
        """
        self.calls.append("2D")
        words = read_words(pointer, 16)
        assert [*words[:4], words[5]] == [0, 0, 4, 0, 0]
        assert [*words[7:11], words[12]] == [0, 0, 4, 0, 0]
        source, pitch, target, there, width, height = (words[i] for i in (4, 6, 11, 13, 14, 15))
        assert width <= min(pitch, there)
        for row in range(height):
            ctypes.memmove(target + row * there, source + row * pitch, width)
        return 0

    def cuMemcpy3DAsync_v2(self, pointer, stream):
        """Read CUDA_MEMCPY3D as 25 words: x, y, z, level, type, host, device, array, reserved,
        pitch, height of the source, the same of the target, then width, height and depth.
        """
        self.calls.append("3D")
        words = read_words(pointer, 25)
        ends = []
        for end in (words[:11], words[11:22]):
            assert [*end[:6], *end[7:9]] == [0, 0, 0, 0, 4, 0, 0, 0]
            ends.append((end[6], *end[9:]))
        (source, pitch, high), (target, there, high_there) = ends
        width, height, depth = words[22:]
        assert width <= min(pitch, there)
        assert height <= min(high, high_there)
        for layer, row in itertools.product(range(depth), range(height)):
            to = target + (layer * high_there + row) * there
            ctypes.memmove(to, source + (layer * high + row) * pitch, width)
        return 0

    def cuStreamBatchMemOp_v2(self, stream, count, operations, flags):
        """Do operations of six words: what, address, value, flags and two that mean nothing."""
        self.calls.append("flags")
        assert flags == 0
        words = read_words(operations, 6 * count)
        for at in range(0, len(words), 6):
            what, address, value, how = words[at : at + 4]
            assert how == 0
            flag = ctypes.c_uint32.from_address(address)
            if what == 2:
                flag.value = value
            else:
                assert what == 1
                if ctypes.c_int32(flag.value - value).value < 0:
                    return 1  # this driver cannot wait
        return 0

    def cuEventCreate(self, pointer, flags):
        self.calls.append("create")
        assert flags == 2
        pointer._obj.value = next(self.events)
        return 0

    def cuEventRecord(self, event, stream):
        self.calls.append(f"record {event.value} on {stream.value}")
        return 0

    def cuStreamWaitEvent(self, stream, event, flags):
        self.calls.append(f"{stream.value} follows {event.value}")
        return flags


def read_words(pointer, count):
    address = ctypes.addressof(getattr(pointer, "_obj", pointer))
    return [*(ctypes.c_uint64 * count).from_address(address)]


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_stream, "_driver", lambda: driver)
    return driver


def geometry(x):
    return x.stride(), x.dtype


def copy_by_driver(copies, targets, sources):
    found = find_bytes(copies, [*map(geometry, targets)], [*map(geometry, sources)])
    CudaStream(7, CudaEvents()).copy(make_launches(found), targets, sources)


B, S, H, D = 3, 8, 6, 4
# Regions of (B, S, H, D) that land packed, and the calls that they take.
CASES = {
    "all": (Region.whole((B, S, H, D), 0), ["1D"]),
    "all, row by row": (Region.whole((B, S, H, D), 3), ["1D"]),
    "heads": (Region((0, 0, 2, 0), (1, 1, 3, D), ((0, 1, B), (1, 1, S))), ["2D"]),
    "heads of some tokens": (Region((0, 1, 2, 0), (1, 1, 3, D), ((0, 1, B), (1, 1, 5))), ["3D"]),
    "some tokens": (Region((0, 1, 0, 0), (1, 5, H, D), ((0, 1, B),)), ["2D"]),
    "some tokens of a row": (Region((1, 1, 0, 0), (1, 5, H, D)), ["1D"]),
    "two runs": (
        Region((0, 1, 2, 0), (1, 1, 3, D), ((0, 1, B), (1, 5, 2), (1, 1, 2))),
        ["3D", "3D"],
    ),
    "two runs of whole tokens": (
        Region((0, 1, 0, 0), (1, 2, H, D), ((0, 1, B), (1, 4, 2))),
        ["2D"],
    ),
    "no tokens": (Region((0, 1, 0, 0), (1, 1, H, D), ((0, 1, B), (1, 1, 0))), []),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_padded", [False, True])
def test_regions_are_copied_in_few_calls(name, is_padded, driver):
    region, calls = CASES[name]
    x = torch.rand(B, S + 1, H, D)[:, :-1] if is_padded else torch.rand(B, S, H, D)
    if is_padded and name == "all":
        with pytest.raises(ValueError, match="contiguous"):
            region.view(x)
        return
    expected = region.view(x)
    memory = torch.zeros(16 + 4 * expected.numel() + 16, dtype=torch.uint8)
    nbytes, counts = 4 * region.entries, region.counts
    pitches = [nbytes]
    for count in reversed(counts[1:]):
        pitches.insert(0, pitches[0] * count)
    into = Region.of_bytes(16, nbytes, counts, pitches[: len(counts)])
    copy_by_driver([Copy(0, into, 0, region)], [memory], [x])
    assert memory[16:-16].view(torch.float32).equal(expected.flatten())
    assert not memory[:16].any() and not memory[-16:].any()
    if not is_padded:
        assert driver.calls == calls


@pytest.mark.parametrize("seed", range(60))
def test_any_region_of_any_tensor_is_copied_as_torch_copies_it(seed, driver):
    """Also where rows or layers are at distances that a copy engine does not take."""
    chance = random.Random(seed)
    shape = [chance.randint(1, 5) for _ in range(4)]
    order = [*chance.sample(range(3), 3), 3]
    tensors = []
    for _ in range(2):
        padded = [size + chance.randint(0, 2) for size in shape]
        whole = torch.rand([padded[dim] for dim in order])
        x = whole.permute([order.index(dim) for dim in range(4)])
        tensors.append(x[tuple(slice(size) for size in shape)])
    source, target = tensors
    if chance.random() < 0.2:
        source = source[:1].expand(shape)
    outer = chance.choice((3, 4))
    expected, region = source.clone(), Region.whole(shape, outer)
    copy_by_driver([Copy(0, region, 0, region)], [target], [source])
    assert target.equal(expected)


def test_rows_too_far_apart_for_the_driver_are_copied_one_by_one():
    far = 3 << 30
    geometries = [((far, 1), torch.uint8)]
    region = Region.whole((2, 5), 1)
    copies = find_bytes([Copy(0, region, 0, region)], geometries, geometries)
    assert [(copy.nbytes, copy.source_at, copy.axes) for copy in copies] == [
        (5, 0, ()),
        (5, far, ()),
    ]


def test_a_batch_takes_no_more_calls_than_one_sequence():
    """Heads of a run of tokens, as Ulysses sends them."""
    region = Region((0, 16, 4, 0), (1, 1, 4, 64), ((0, 1, 8), (1, 1, 16)))
    strides = (64 * 8 * 64, 8 * 64, 64, 1)
    place = Region.of_bytes(0, 4 * 64 * 2, (8, 16), (128 * 512, 512))
    found = find_bytes([Copy(0, place, 0, region)], [_BYTES], [(strides, torch.bfloat16)])
    [(_, _, _, source_at, nbytes, axes)] = found
    assert (source_at, nbytes) == ((16 * 512 + 4 * 64) * 2, 512)
    assert axes == ((8, 128 * 512, 64 * 8 * 64 * 2), (16, 512, 1024))


def test_what_is_tried_out_is_a_call_of_each_kind(driver):
    here, there = (torch.arange(2048) % 251).to(torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    copy_by_driver(_EXAMPLES, [there], [here])
    assert driver.calls == ["2 x 1D", "2D", "3D"]
    assert there.count_nonzero() == 2 * 4 + 2 * 4 + 4 * 4


def test_flags_are_written_and_waited_for_together(driver):
    memory = torch.zeros(8, dtype=torch.int32)
    flags, stream = [memory[1:2], memory[5:6]], CudaStream(7, CudaEvents())
    for value in (3, -1, 4):
        stream.write(flags, value)
        assert memory.tolist() == [0, value, 0, 0, 0, value, 0, 0]
        stream.wait(flags, value)
        stream.wait(flags, value - 1)
        with pytest.raises(RuntimeError, match="cuStreamBatchMemOp failed with CUDA error 1"):
            stream.wait(flags, value + 1)
    calls = len(driver.calls)
    stream.write([], 1)
    assert len(driver.calls) == calls


def test_events_are_used_again_once_nobody_holds_them(driver):
    events = CudaEvents()
    first, second = CudaStream(7, events), CudaStream(8, events)
    kept = first.record()
    for _ in range(3):
        second.follow(first.record())
    second.follow(kept)
    assert driver.calls == [
        "create",
        "record 1 on 7",
        "create",
        *["record 2 on 7", "8 follows 2"] * 3,
        "8 follows 1",
    ]


def test_a_copy_that_the_driver_refuses_raises(driver):
    driver.cuMemcpyDtoDAsync_v2 = lambda *_: 700
    x = torch.zeros(4)
    region = Region.whole(x.shape, 0)
    with pytest.raises(RuntimeError, match="failed with CUDA error 700"):
        copy_by_driver([Copy(0, region, 0, region)], [x], [x])


def _copies_of_runs():
    """Three runs of a tensor to two others, and between them heads of another tensor to a third."""
    runs = [Region((start, 0, 0), (2, 4, 2)) for start in (1, 4, 6)]
    heads = Region((0, 1, 0), (1, 2, 2), ((0, 1, 8),))
    placed = [(0, runs[0], 0), (1, runs[1], 0), (2, heads, 1), (1, runs[2], 0)]
    return [Copy(target, region, source, region) for target, region, source in placed]


@pytest.mark.parametrize("has_batches", [True, False])
def test_contiguous_copies_are_made_together_if_the_driver_can(has_batches, driver, monkeypatch):
    if not has_batches:
        monkeypatch.delattr(Driver, "cuMemcpyBatchAsync")
    geometries = [((8, 2, 1), torch.float32)]
    launches = make_launches(find_bytes(_copies_of_runs(), 3 * geometries, 2 * geometries))
    for _ in range(2):  # with other addresses, too
        (tokens, others), found = torch.rand(2, 8, 4, 2), torch.zeros(3, 8, 4, 2)
        expected = found.clone()
        expected[0, 1:3], expected[1, 4:8], expected[2, :, 1:3] = (
            tokens[1:3],
            tokens[4:8],
            others[:, 1:3],
        )
        CudaStream(7, CudaEvents()).copy(launches, [*found], [tokens, others])
        assert found.equal(expected)
    assert driver.calls == 2 * (["3 x 1D", "2D"] if has_batches else ["1D", "1D", "2D", "1D"])


def test_a_copy_among_several_that_the_driver_refuses_raises(driver):
    copies, short = _copies_of_runs(), Region((4, 0, 0), (1, 4, 2))
    copies[1] = Copy(1, short, 0, short)
    driver.refused = 4 * 4 * 2
    tensors = [*torch.zeros(3, 8, 4, 2)]
    with pytest.raises(RuntimeError, match="3 copies together, number 1 of 32 bytes failed"):
        copy_by_driver(copies, tensors, tensors)
