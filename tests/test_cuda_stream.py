"""Operations of CUDA streams: that the driver gets them as its documentation says. A driver of CPU
memory stands for CUDA's.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from bmt_burst.transport import cuda_stream
from bmt_burst.transport.cuda_stream import CudaStream

STREAM = SimpleNamespace(cuda_stream=7)


class Driver:
    """The functions of libcuda on the CPU's memory. `calls` are their names, in order."""

    def __init__(self):
        self.calls = []
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


def read_words(pointer, count):
    address = ctypes.addressof(getattr(pointer, "_obj", pointer))
    return [*(ctypes.c_uint64 * count).from_address(address)]


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_stream, "_driver", lambda: driver)
    return driver


def test_flags_are_written_and_waited_for_together(driver):
    memory = torch.zeros(8, dtype=torch.int32)
    flags, stream = [memory[1:2], memory[5:6]], CudaStream(STREAM)
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


def random_copies():
    """Return copies of three runs of bytes to another tensor, and of nothing."""
    source, target = torch.randint(256, (2, 64), dtype=torch.uint8)
    return [(target[a:b], source[a - 1 : b - 1]) for a, b in ((1, 4), (10, 10), (10, 20), (20, 64))]


@pytest.mark.parametrize("has_batches", [True, False])
def test_copies_are_made_together_if_the_driver_can(has_batches, driver, monkeypatch):
    if not has_batches:
        monkeypatch.delattr(Driver, "cuMemcpyBatchAsync")
    copies, stream = random_copies(), CudaStream(STREAM)
    stream.copy(copies)
    assert all(target.equal(source) for target, source in copies)
    stream.copy(copies[:2])
    assert driver.calls == (["3 x 1D", "1D"] if has_batches else ["1D"] * 4)


def test_a_copy_that_the_driver_refuses_raises(driver):
    driver.cuMemcpyDtoDAsync_v2 = lambda *_: 700
    with pytest.raises(RuntimeError, match="failed with CUDA error 700"):
        CudaStream(STREAM).copy(random_copies()[:1])
    driver.refused = 10
    with pytest.raises(RuntimeError, match="3 copies together, number 1 of 10 bytes failed"):
        CudaStream(STREAM).copy(random_copies())
