"""The golden values of CPM-Live's models (tests/fixtures/README.md), and their rows on ranks."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from bmt_burst import Layout, Scores
from models.cpm_ant import AntConfig, CPMAnt, ant_scores
from models.cpm_bee import BeeConfig, CPMBee, bee_scores
from models.cpm_live.config import LiveConfig
from models.cpm_live.layers import LiveModel
from tests.launcher import ROOT
from train import make_vocabulary

BEE_FIELDS = ["length", "context", "sample_ids", "num_segments", "segment", "segment_rel_offset"]
BEE_FIELDS += ["segment_rel", "span"]
ANT_FIELDS = ["length", "context", "segment", "span"]
SMALL_LIVE = {"dim_model": 32, "num_heads": 2, "dim_head": 16, "dim_ff": 48}


@dataclass(frozen=True)
class Golden:
    """A file: its configuration, and tensors by name."""

    name: str
    config: LiveConfig
    tensors: dict[str, Tensor]

    def all(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors called "kind.", by the rest of their names."""
        start = f"{kind}."
        named = self.tensors.items()
        return {name.removeprefix(start): x for name, x in named if name.startswith(start)}

    @property
    def input(self) -> dict[str, Tensor]:
        return self.all("input")

    def model(
        self, dtype: torch.dtype = torch.float32, config: LiveConfig | None = None, **options
    ) -> LiveModel:
        model = (CPMBee if self.name == "bee" else CPMAnt)(config or self.config, **options)
        model.load_state_dict(self.all("param"))
        return model.to(dtype)

    def scores(self, fields: dict[str, Tensor] | None = None) -> list[Scores]:
        """Return the scores of each row, by default of the file's rows."""
        fields = fields or self.input
        make, names = (bee_scores, BEE_FIELDS) if self.name == "bee" else (ant_scores, ANT_FIELDS)
        rows = zip(*(fields[name] for name in names), strict=True)
        return [make(self.config, *row) for row in rows]

    def projected(self, grad: Tensor) -> Tensor:
        """Return a parameter's gradient as the file has it. A matrix (rows, columns) of more than
        16 columns is multiplied by the file's signs (columns, 16) in fp64. A change of an entry
        changes 16 numbers of its row, and the relative error is the same but for chance.
        """
        if grad.dim() < 2 or grad.shape[1] <= 16:
            return grad
        return grad.double() @ self.tensors["signs"][: grad.shape[1]].double()

    def layouts(self, name: str, size: int) -> list[Layout]:
        """Return the layout of this name for each row."""
        if name == "balanced":
            return [Layout.balanced(scores.mask, size) for scores in self.scores()]
        return [Layout.named(name, 96, size)] * 2

    def arguments(
        self, layouts: list[Layout], rank: int, fields: dict[str, Tensor] | None = None
    ) -> tuple:
        """Return the arguments of a rank's forward before `scores`."""
        fields = fields or self.input
        part = functools.partial(shard_rows, layouts=layouts, rank=rank)
        if self.name == "bee":
            tables = fields["ext_table_ids"], fields["ext_table_sub"]
            return part(fields["input"]), part(fields["input_sub"]), *tables
        positions = torch.stack([layout.positions(rank) for layout in layouts])
        return part(fields["input"]), part(fields["segment"]), positions


def shard_rows(x: Tensor, layouts: list[Layout], rank: int) -> Tensor:
    """Return a rank's part of rows (B, S) with layouts of their own."""
    return torch.stack([layout.shard(row, rank, 0) for row, layout in zip(x, layouts, strict=True)])


def unshard_rows(parts: list[Tensor], layouts: list[Layout]) -> Tensor:
    """Return whole rows (B, S, ...) from the parts of all ranks."""
    rows = (layout.unshard([p[i] for p in parts], 0) for i, layout in enumerate(layouts))
    return torch.stack([*rows])


@functools.cache
def golden(name: str) -> Golden:
    """Return the golden values of "bee" or "ant"."""
    packed = ROOT / f"tests/fixtures/cpm_{name}_tiny.safetensors.gz"
    stored = gzip.decompress(packed.read_bytes())
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])["__metadata__"]
    values = json.loads(header["config"])
    values["residual_divisor"] = float(header["residual_divisor"])
    config = (BeeConfig if name == "bee" else AntConfig).from_dict(values)
    return Golden(name, config, safetensors.torch.load(stored))


def changed(config: LiveConfig, **changes) -> LiveConfig:
    return dataclasses.replace(config, **changes)


def write_vocabulary(file: Path, *pieces: str, model: str = "cpm-bee") -> Path:
    """Write the model's special tokens and these pieces, one a line."""
    file.write_text("".join(f"{piece}\n" for piece in (*make_vocabulary.SPECIAL[model], *pieces)))
    return file


def as_jsonl(file: Path, lines: Sequence) -> Path:
    """Write lines of JSON. Texts are written as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts))
    return file


def bee_instance() -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Return the first instance of the golden batch: its context as a row to be continued, and the
    tokens predicted in it, each as (its segment, its place in the logits).
    """
    fields = golden("bee").input
    alone = (fields["span"][0] == 0) & (torch.arange(96) < fields["length"][0])
    row = {name: x[0][alone] for name, x in fields.items() if x.shape == (2, 96)}
    given, tables = row["context"], ("ext_table_ids", "ext_table_sub")
    extended = list(zip(*(fields[name].tolist() for name in tables), strict=True))
    predicted = (row[name][~given].tolist() for name in ("segment", "input", "input_sub"))
    hidden = [
        (segment, 120 + extended.index((token, sub)) if sub else token)
        for segment, token, sub in zip(*predicted, strict=True)
    ]
    row = {name: x[given] for name, x in row.items()} | {name: fields[name] for name in tables}
    return row | {"segment_rel": fields["segment_rel"][0]}, hidden
