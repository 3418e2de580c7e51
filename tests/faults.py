"""Deliberate faults, and the tests that must find them.

Run it after tests were removed or merged: it copies the repository once, puts in one fault at a
time, and runs the named tests. It fails if tests pass despite a fault. It takes some minutes.

    python tests/faults.py            all faults
    python tests/faults.py sinks loss those whose names contain a word

A fault is a replacement of text. If the text is gone, the script says so: update the entry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "results")
_SECONDS = 600  # for the tests of one fault


class Fault(NamedTuple):
    """A replacement of `right` by `wrong` in a file, and the test files that must fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


FAULTS = [
    Fault(
        "merge: partial outputs are weighed the wrong way around",
        "bmt_burst/merging/parts.py",
        "torch.sigmoid(lse - other)",
        "torch.sigmoid(other - lse)",
        "tests/test_merge.py",
    ),
    Fault(
        "kernel: a causal band shows one key too many",
        "bmt_burst/kernels/reference.py",
        "inside &= ahead <= call.right",
        "inside &= ahead <= call.right + 1",
        "tests/test_kernels.py tests/conformance/test_kernels.py",
    ),
    Fault(
        "softcap: the gradient leaves out the derivative of tanh",
        "bmt_burst/kernels/reference.py",
        "dscores = dscores * (1 - (scores / spec.softcap).square())",
        "dscores = dscores * 1",
        "tests/test_softcap_and_sinks.py",
    ),
    Fault(
        "sinks: their gradient has the wrong sign",
        "bmt_burst/merging/sinks.py",
        "return -(probs * delta)",
        "return (probs * delta)",
        "tests/test_softcap_and_sinks.py",
    ),
    Fault(
        "layout: zigzag's second chunks are those of the next rank",
        "bmt_burst/sequence/layout.py",
        "2 * self.size - 1 - rank)",
        "2 * self.size - 1 - (rank + 1) % self.size)",
        "tests/test_layout.py tests/conformance/test_layouts.py",
    ),
    Fault(
        "labels: the last token of a document learns the next document",
        "bmt_burst/sequence/layout.py",
        "torch.tensor([stop - 1 for _, stop in mask.parts]",
        "torch.tensor([stop - 1 for _, stop in mask.parts[-1:]]",
        "tests/test_documents.py tests/test_loss.py tests/test_layout.py",
    ),
    Fault(
        "ring: a sum still reads memory that it has given back",
        "bmt_burst/strategies/ring/execution.py",
        "if self.returning[-1].recycled:",
        "if not self.returning[-1].recycled:",
        "tests/conformance/test_strategies.py",
    ),
    Fault(
        "ring: gradients that return land in the wrong order",
        "bmt_burst/strategies/ring/routes.py",
        "nearer = (h for h in self.hops if h < hop)",
        "nearer = (h for h in self.hops if h > hop)",
        "tests/test_routes.py tests/conformance/test_strategies.py",
    ),
    Fault(
        "packing: a message begins one batch row too late",
        "bmt_burst/transport/packing.py",
        "start + (row * tokens + at[0]) * size",
        "start + (row * (tokens + 1) + at[0]) * size",
        "tests/conformance/test_strategies.py",
    ),
    Fault(
        "agreement: a rank that begins something else is not refused",
        "bmt_burst/ranks/agreement.py",
        "if other != doing[0]:",
        "if not other:",
        "tests/test_agreement.py",
    ),
    Fault(
        "agreement: ranks with other terms go on",
        "bmt_burst/ranks/agreement.py",
        "if digests.count(digests[0]) == len(digests):",
        "if digests:",
        "tests/test_attention.py",
    ),
    Fault(
        "requests: a call with gradient takes the request of one without",
        "bmt_burst/calls/requests.py",
        "x.layout, x.requires_grad)",
        "x.layout)",
        "tests/test_attention.py tests/test_whole.py",
    ),
    Fault(
        "sockets: a rank that closed the group is not reported",
        "bmt_burst/transport/sockets.py",
        "            peer.check_open(kind)",
        "            pass",
        "tests/test_sockets.py",
    ),
    Fault(
        "sparse: first blocks are not always chosen",
        "bmt_burst/sparse/torch_choice.py",
        "(block < sparse.init_blocks) | ",
        "",
        "tests/test_sparse.py tests/test_sparse_kernels.py",
    ),
    Fault(
        "bias: its gradient is half of what it should be",
        "bmt_burst/kernels/reference.py",
        "_ungrouped(dv), dscores.flatten(1, 2)",
        "_ungrouped(dv), dscores.flatten(1, 2) * 0.5",
        "tests/test_scores.py",
    ),
    Fault(
        "training: gradients are not clipped",
        "train/engine/common.py",
        "factor = min(1.0, max_norm / norm if norm else 1.0) / loss_scale",
        "factor = 1.0 / loss_scale",
        "tests/test_engine.py tests/test_trainer.py",
    ),
    Fault(
        "streaming: a resumed run repeats its last row",
        "train/data/lane.py",
        'self.rows, self._token = state["rows"], state["token"]',
        'self.rows, self._token = state["rows"], max(state["token"] - seq_len, 0)',
        "tests/test_stream.py",
    ),
    Fault(
        "checkpoints: a file that was cut short passes as whole",
        "train/checkpoints/rank_file.py",
        'return {"bytes": size, "sha256": digest.hexdigest()}',
        'return {"bytes": 0, "sha256": ""}',
        "tests/test_checkpoint.py",
    ),
    Fault(
        "states: a chunk does not decay the state of earlier tokens",
        "bmt_burst/lightning/segments.py",
        "edge = [Faded(~enters[document], at - document)]",
        "edge = [Faded(~enters[document], 0)]",
        "tests/conformance/test_extensions.py",
    ),
    Fault(
        "states: a second run that differs is not found",
        "bmt_burst/lightning/memory.py",
        "self.difference = find_difference(found, kept, self.like.dtype)",
        "self.difference = torch.zeros_like(self.difference)",
        "tests/test_parts.py",
    ),
    Fault(
        "new tokens: ranks do not find that they were given other ones",
        "bmt_burst/memories/new_tokens.py",
        "(signs - signs[:1]).abs() > rounding",
        "(signs - signs[:1]).abs() > torch.inf",
        "tests/test_cache.py",
    ),
    Fault(
        "cache: a key that was taken back is still seen",
        "bmt_burst/memories/new_tokens.py",
        "self.count = len(self.prompt) + count_own(self.sp, self.start, length)",
        "pass",
        "tests/test_cache.py",
    ),
]


def finds(fault: Fault, folder: Path) -> bool:
    """Whether tests fail with the fault in a copy of the repository. Afterwards the copy is as
    before.
    """
    file = folder / fault.file
    text = file.read_text()
    if text.count(fault.right) != 1:
        sys.exit(f"{fault.name}: expected '{fault.right}' once in {fault.file}: update the entry")
    file.write_text(text.replace(fault.right, fault.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *fault.tests.split()],
            cwd=folder,
            env=environment,
            timeout=_SECONDS,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        print(f"{fault.name}: the tests hang")
        return False
    finally:
        file.write_text(text)
    if done.returncode > 1:
        sys.exit(f"{fault.name}: the tests cannot run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> None:
    words = sys.argv[1:]
    chosen = [x for x in FAULTS if not words or any(word in x.name for word in words)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "copy"
        shutil.copytree(ROOT, folder, ignore=_SKIPPED)
        missed = []
        for fault in chosen:
            is_found = finds(fault, folder)
            print(f"{'found ' if is_found else 'MISSED'} {fault.name}", flush=True)
            if not is_found:
                missed.append(fault.name)
    if missed:
        sys.exit(f"{len(missed)} of {len(chosen)} faults were missed")


if __name__ == "__main__":
    main()
