"""Flags and copies of CUDA streams, by a driver of CPU memory that does as CUDA's says."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from bmt_burst.transport import cuda_stream
from bmt_burst.transport.cuda_stream import CudaStream

STREAM = SimpleNamespace(cuda_stream=7)


class Driver:
    """The functions of libcuda on the CPU's memory, and the number of its calls."""

    calls = 0

    def cuStreamBatchMemOp_v2(self, stream, count, operations, flags):
        """Do operations of six words: what, address, value, flags and two that mean nothing."""
        self.calls += 1
        assert (stream.value, flags) == (7, 0)
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

    def cuMemcpyAsync(self, target, source, nbytes, stream):
        assert stream.value == 7
        ctypes.memmove(target.value, source.value, nbytes.value)
        return int(nbytes.value > 8)  # this driver copies no more


def read_words(pointer, count):
    return [*(ctypes.c_uint64 * count).from_address(ctypes.addressof(pointer))]


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
    calls = driver.calls
    stream.write([], 1)
    assert driver.calls == calls


def test_memory_is_copied_between_addresses(driver):
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    stream = CudaStream(STREAM)
    stream.copy(target.data_ptr() + 2, source.data_ptr() + 3, 5)
    assert target.tolist() == [0, 0, 3, 4, 5, 6, 7, 0]
    with pytest.raises(RuntimeError, match="cuMemcpyAsync failed with CUDA error 1"):
        stream.copy(target.data_ptr(), source.data_ptr(), 9)
