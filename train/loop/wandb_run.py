"""The records of a run in Weights & Biases (--wandb PROJECT), which rank 0 writes.

A resumed run continues OUTPUT/wandb/run.json's, and repeats steps after its checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.base.files import replacing


def check_installed(project: str | None) -> None:
    """Raise ValueError if a project is given, and wandb is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb needs the package wandb: pip install 'bmt_burst[wandb]'")


class WandbRun:
    """The wandb run of the run in `folder`. Raises ValueError if wandb refuses to start."""

    def __init__(self, project: str, folder: Path, settings: dict[str, Any]):
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._start(project, folder, settings)
        self._run.define_metric("*", step_metric="step")
        file = folder / "wandb/run.json"
        file.parent.mkdir(exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps({"project": project, "id": self._run.id}) + "\n")

    def _start(self, project: str, folder: Path, settings: dict[str, Any]) -> Any:
        errors = self._wandb.errors
        options = {
            "project": project,
            "id": _saved_id(folder / "wandb/run.json", project),
            "resume": "allow",
            "name": folder.name,
            "dir": str(folder),
            "config": settings,
            # the run prints to its own log, and a terminal may be closed
            "settings": self._wandb.Settings(console="off"),
        }
        try:
            return self._wandb.init(**options)
        except (errors.UsageError, errors.AuthenticationError) as error:
            raise ValueError(f"--wandb {project}: {error}") from error
        except errors.CommError as error:
            print(f"wandb cannot be reached, and records offline: {error}", file=sys.stderr)
            return self._wandb.init(**options, mode="offline")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()


def _saved_id(file: Path, project: str) -> str | None:
    """Return the id of the wandb run that this folder has in `project`, if there is one."""
    saved = json.loads(file.read_text()) if file.is_file() else {}
    return saved["id"] if saved.get("project") == project else None
