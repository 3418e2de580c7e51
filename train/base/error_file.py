"""The file in which torchrun looks for the reason of a rank that failed, to show it in its summary.

torchrun names it in TORCHELASTIC_ERROR_FILE, for each rank another. torch's own `record`, the
decorator of torch.distributed.elastic.multiprocessing.errors, writes tracebacks there. Here it gets
the sentence that a rank says.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

_LATER = 5  # seconds, more than torchrun lets pass between looks at its ranks


def leave_reason(sentence: str, cause: bool = True) -> None:
    """Write why this process fails to torchrun's file, if there is one; a disk that is full holds
    up no end.

    The first reason stays: what comes after it, such as lost contact while a watchdog shows stacks,
    follows from it.
    The file is whole or not there: torchrun may end this process meanwhile, and fails itself over
    half a file. torchrun takes the earliest failure for the root cause. A rank that fails since
    another one did, which is no `cause`, dates its own some seconds later.
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
