"""The configuration of a pretraining run: its settings, checked, and the model that they name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import CPMConfig
from models.json_files import read_json
from models.tensor_files import is_file
from models.weights import Expected
from train.base.wording import flag
from train.checkpoints import checkpoint
from train.engine.fp8 import check_model
from train.registry import KINDS, Kind
from train.settings.checks import check_layers, check_settings
from train.settings.kinds import (
    DEFAULT_MODEL,
    PRESETS,
    ModelConfig,
    config_of,
    expected_weights,
    kind_of,
    read_model,
    saved_model,
)
from train.settings.settings import Settings

_INSTEAD = ("rope_theta", "rope_scaling", "sparse", "window")  # options that replace the model's


@dataclass(frozen=True)
class TrainConfig(Settings):
    """All settings of a run. Raises ValueError for settings that do not fit together."""

    def __post_init__(self) -> None:
        check_settings(self)

    def model_config(self) -> ModelConfig:
        """Return the model's shape. Raises ValueError for options that do not go with the model."""
        named = self.named_model()
        instead = {name: getattr(self, name) for name in _INSTEAD}
        given = {name: value for name, value in instead.items() if value is not None}
        try:
            model = dataclasses.replace(named, **given)
        except ValueError as error:
            options = ", ".join(map(flag, given))
            raise ValueError(f"{options} with {self.model_name}: {error}") from error
        if isinstance(model, CPMConfig):
            check_layers(self, model)
        if self.fp8:
            self._check_fp8(model)
        return model

    def _check_fp8(self, model: ModelConfig) -> None:
        assert isinstance(model, CPMConfig), "_check_kind refuses the others"
        try:
            check_model(model)
        except ValueError as error:
            raise ValueError(f"--fp8 with {self.model_name}: {error}") from error

    @property
    def model_name(self) -> str:
        """The model for messages: as its user named it, or where it is from."""
        if given := self.given_model:
            return given
        resumed = self.resumed()
        return f"the model of {resumed[0]}" if resumed else f"the default model {DEFAULT_MODEL}"

    @property
    def model_source(self) -> str:
        """The folder, file, preset or checkpoint that the model is from."""
        if given := self.init_from or self.model:
            return given
        resumed = self.resumed()
        return str(resumed[0]) if resumed else DEFAULT_MODEL

    def resumed(self) -> tuple[Path, Any] | None:
        """Return the checkpoint of --resume and its state, which may be damaged, or None for a run
        that starts. Raises CheckpointError for one that cannot be read, and ValueError for a
        --new-stage that has none.
        """
        if self.resume == "never":
            return None
        root = Path(self.output if self.resume == "auto" else self.resume)
        found = checkpoint.peek(root)
        if found is None and self.resume != "auto":
            raise checkpoint.CheckpointError(f"there is no checkpoint in {root}")
        if found is None and self.new_stage:
            raise ValueError(
                f"{root} has no checkpoint of a stage yet: give --resume CHECKPOINT to start one"
            )
        return found

    def named_model(self) -> ModelConfig:
        """Return the shape of the starting weights, with the head of --untie."""
        named = self._read_model()
        self._check_kind(kind_of(named))
        is_untied = isinstance(named, CPMConfig) and not named.tie_embeddings
        if not self.untie or (is_untied and self.given_model is None and self.resumed()):
            return named
        assert isinstance(named, CPMConfig), "_check_kind refuses the others"
        try:
            return named.untied()
        except ValueError as error:
            raise ValueError(f"--untie with {self.model_name}: {error}") from error

    def expected_weights(self) -> Expected:
        """Return how to check the weights of --init-from. Raises ValueError as `model_config`."""
        source = Path(self.init_from or "")
        return expected_weights(source, self.named_model(), self.model_name, self.untie)

    def accepted_fields(self) -> dict[str, Any]:
        """Return the fields of --accept-field with their values. Raises ValueError or OSError."""
        if not self.accepted_names:
            return {}
        assert self.model_file is not None, "check_settings refuses the others"
        values = read_json(self.model_file)
        if missing := [name for name in self.accepted_names if name not in values]:
            raise ValueError(
                f"--accept-field {','.join(missing)}: expected a field of {self.model_file}"
            )
        return {name: values[name] for name in self.accepted_names}

    def _read_model(self) -> ModelConfig:
        if self.init_from and not is_file(self.init_from):
            if not Path(self.init_from).exists() and self.resumed():
                raise ValueError(
                    f"folder {self.init_from} does not exist; leave out --init-from to continue "
                    "with the checkpoint's model"
                )
            found = read_model(Path(self.init_from), self.accepted_names)
            self._check_folder_of_weights(kind_of(found))
            return found
        if self.model is None:
            resumed = self.resumed()
            return PRESETS[DEFAULT_MODEL] if resumed is None else saved_model(*resumed)
        if self.model in PRESETS:
            return PRESETS[self.model]
        path = Path(self.model)
        if path.suffix != ".json" or not path.is_file():
            raise ValueError(
                f"--model {self.model} is neither a preset ({', '.join(PRESETS)}) nor a JSON file"
            )
        try:
            found = config_of(json.loads(path.read_text()), self.accepted_names)
        # missing, unknown or wrong fields, text that is not JSON, or JSON that is nested too deeply
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        self.accepted_fields()  # other files than Hugging Face's may lack them
        return found

    def _check_folder_of_weights(self, found: Kind) -> None:
        """Raise ValueError for a folder with another kind of model than the preset of --model."""
        named = kind_of(PRESETS[self.model]) if self.model in PRESETS else KINDS[0]
        if named not in (KINDS[0], found):
            raise ValueError(
                f"--init-from {self.init_from}, a {found.name}, does not go with --model "
                f"{self.model}, a {named.name}: give a folder or a file of its weights"
            )

    def _check_kind(self, kind: Kind) -> None:
        """Raise ValueError for options that do not go with such a model."""
        for name, reason in kind.refused.items():
            value = getattr(self, name)
            if value is not False and value not in (None, "auto"):
                raise ValueError(
                    f"{flag(name)} does not go with {self.model_name}, a {kind.name}: {reason}"
                )
