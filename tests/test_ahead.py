"""Kernels that are compiled before a first step: once, and again if anything they depend on
changed.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bmt_burst import ahead, burst_attn_func
from bmt_burst.kernels import fa4
from tests.launcher import is_running, wait_until_ended
from tests.test_warming import fake_kernel


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of kernels, as if there were a GPU with memory for one process."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 0))
    monkeypatch.setattr(ahead, "installed", lambda module: True)
    monkeypatch.setattr(fa4, "cache_folder", lambda: tmp_path / "fa4")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def call_once(place):
    """Steps that call FlashAttention-4 once. What compiles the call notes it in a file."""

    def compute(q, *_, **options):
        with open(place, "a") as file:
            file.write(f"forward {tuple(q.shape)}\n")
        return q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    def compute_back(q, k, v, *_, **options):
        with open(place, "a") as file:
            file.write("backward\n")
        return q, k, v

    if place is None:
        raise RuntimeError("out of memory")
    if place == "killed":
        os._exit(9)
    fa4.functions = lambda: (compute, compute_back)
    fake_kernel(setattr)
    q = torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    out = burst_attn_func(
        q, q, q, causal=True, flash="fa4", process_group=ahead.imagine_ranks(0, 1).process_group
    )
    out.sum().backward()


def call_again(place):
    """Other steps with the same arguments."""
    call_once(place)


def note_imports(place):
    """Steps that note which process imported a module, and what CUDA told it and tells them."""
    imported = importlib.import_module("asks_cuda")
    shared = os.getppid() == imported.PROCESS
    with open(place, "a") as file:
        file.write(f"{shared} {imported.CUDA} {torch.cuda.is_available()}\n")


def kill_parent(place):
    """Steps that end the process that forked theirs."""
    os.kill(os.getppid(), 9)
    time.sleep(600)


def kill_idle(place):
    """Steps that end the other processes of the pool, which wait for a job."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in {*map(int, children)} - {os.getpid()}:
        os.kill(child, 9)
    time.sleep(600)


def hang(place):
    """Steps that do not end, of a process that is noted."""
    with open(f"{place}.new", "w") as file:
        file.write(f"{os.getpid()}")
    os.rename(f"{place}.new", place)
    time.sleep(600)


class CodeError(Exception):
    """An error that pickle cannot read, as those of some compilers."""

    def __init__(self, name, line):
        super().__init__(f"{name}, line {line}")


def fail(place):
    raise CodeError("kernel", 3)


def compile_calls(*places, steps=call_once, tokens=300, limit=600.0, **options):
    arguments = [(place,) for place in places]
    found = [*ahead.compile_kernels(steps, arguments, tokens, limit=limit, **options)]
    return found[-1].count, len(found)


def test_kernels_are_compiled_once(folder):
    place = str(folder / "calls")
    assert compile_calls(place, place)[0] == 2
    calls = (folder / "calls").read_text()
    assert calls == "backward\nforward (1, 300, 2, 64)\n", "each once, and what takes longest first"
    with ahead.Compiler() as unused:
        assert compile_calls(place, place, compiler=unused) == (2, 1), "marks say so"
        assert not unused._process.is_alive()
    [first] = [mark.name for mark in (folder / "fa4").iterdir()]
    assert compile_calls(place, place, tokens=400)[1] > 1, "of longer sequences there may be more"
    with pytest.raises(TimeoutError, match="0 kernels took more than 0 s"):
        compile_calls(place, place, steps=call_again, limit=0.0)
    assert compile_calls(place, place) == (2, 1)
    [mark] = [x for x in (folder / "fa4").iterdir() if x.name == first]
    mark.unlink()  # as where the kernels were removed
    assert compile_calls(place, place)[1] > 1
    with pytest.raises(RuntimeError, match="out of memory"):
        compile_calls(None)
    with pytest.raises(RuntimeError, match="CodeError: kernel, line 3"):
        compile_calls("nowhere", steps=fail, limit=120.0)
    with pytest.raises(RuntimeError, match="a process ended with exit code 9"):
        compile_calls("killed")
    with pytest.raises(RuntimeError, match="a process ended with exit code -9"):
        compile_calls("its parent", steps=kill_parent)
    (folder / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "file" / "triton"))
        with pytest.raises(NotADirectoryError):
            compile_calls(place)


def test_an_idle_process_that_is_killed_is_told(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(RuntimeError, match="a process ended with exit code -9"):
        compile_calls("idle", steps=kill_idle, limit=60.0)


def test_a_compiler_ends_with_its_program(folder):
    """Also if the program forgot it, and if the program is killed while it imports."""
    (folder / "kills.py").write_text("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)")
    fake = f"import sys, time, torch; sys.path.append('{folder}'); "
    fake += "torch.cuda.get_device_capability = lambda: (9, 0); from bmt_burst import ahead; "
    for modules, wait, code in (("", 0, 0), ("'kills'", 60, -9)):
        compiler = f"x = ahead.Compiler({modules}); print(x._process.pid, flush=True); "
        line = [sys.executable, "-c", f"{fake}{compiler}time.sleep({wait})"]
        done = subprocess.run(line, capture_output=True, timeout=100)
        assert done.returncode == code, done.stderr
        wait_until_ended([int(done.stdout)])


def test_a_mark_depends_on_all_files_of_a_package(folder, monkeypatch):
    (folder / "of_steps").mkdir()
    (folder / "of_steps/__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    marks = set()
    for code in ("WIDTH = 1", "WIDTH = 2"):
        (folder / "of_steps/model.py").write_text(code)
        marks.add(ahead._name_mark(call_once, [], 300, ["of_steps"]))
    assert len(marks) == 2


def test_imports_are_shared_and_initialize_no_cuda(folder, monkeypatch):
    """Forked processes could not use CUDA otherwise. They may, since they get its own answers."""
    asks = "import os, torch\nPROCESS = os.getpid()\n"
    asks += "CUDA = torch.cuda.is_available(), torch.cuda.get_device_capability()\n"
    (folder / "asks_cuda.py").write_text(asks)
    monkeypatch.syspath_prepend(folder)
    place = str(folder / "imports")
    with ahead.Compiler("asks_cuda") as compiler:
        options = {"modules": ["asks_cuda"], "compiler": compiler}
        assert compile_calls(place, place, steps=note_imports, **options)[0] == 0
    line = f"True (True, (9, 0)) {torch.cuda.is_available()}\n"
    assert (folder / "imports").read_text() == 2 * line
    fails = "import multiprocessing\nassert not multiprocessing.parent_process(), 'no driver'\n"
    (folder / "fails.py").write_text(fails)
    with pytest.raises(RuntimeError, match=r"^AssertionError: no driver$"):
        compile_calls(place, modules=["fails"], limit=100.0)


def test_an_interrupt_is_for_the_run_alone(folder):
    """Ctrl-C reaches all processes of a terminal, also one that begins to import."""
    with ahead.Compiler() as compiler:
        os.kill(compiler._process.pid, signal.SIGINT)
        assert compile_calls(str(folder / "calls"), compiler=compiler)[0] == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_that_hang_end_with_their_caller(folder):
    place = folder / "process"
    compiling = ahead.compile_kernels(hang, [(str(place),)], 300, limit=300.0)
    while not place.exists():
        next(compiling)
    process = int(place.read_text())
    assert is_running(process)
    compiling.close()
    wait_until_ended([process])
