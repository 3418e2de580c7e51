"""The file from which torchrun reads why a rank failed. torchrun shows the reason in its summary.

torchrun names a file for each rank in TORCHELASTIC_ERROR_FILE. torch's decorator `record`, of
torch.distributed.elastic.multiprocessing.errors, writes a traceback there. The scripts of train/
write the sentence that the rank prints.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

_LATER = 5  # seconds; torchrun checks its ranks more often


def leave_reason(sentence: str, cause: bool = True) -> None:
    """Write why this process fails to torchrun's file, if there is one. Ignore a full disk.

    Only the first reason is kept: later ones follow from it. The file is written whole or not at
    all, since torchrun fails on half a file. It takes the earliest failure for the root cause, so
    a rank that fails because another one did passes `cause=False`, and is dated seconds later.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or os.path.exists(file):
        return
    failed = int(time.time()) + (0 if cause else _LATER)
    reason = {"message": {"message": sentence, "extraInfo": {"timestamp": str(failed)}}}
    partial = Path(f"{file}.partial")
    with suppress(OSError):
        partial.write_text(json.dumps(reason))
        partial.replace(file)
