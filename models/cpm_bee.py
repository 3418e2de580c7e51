"""CPM-Bee: nested data as text. Each token has a segment in a tree. Sub-ids rotate special tokens.

    scores = [bee_scores(config, *fields_of_row) for ...]       # of whole rows, on the CPU
    loss, count = model(tokens, subs, ext_tokens, ext_subs, scores, labels)

Parameters have CPM-Live's names and shapes: its checkpoints load as they are.

Letters: B batch, S tokens of this rank, V vocabulary, N tokens with sub-ids, E dim_model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bmt_burst import Cache
from bmt_burst.nn import Layouts, apply_rope, rope_tables
from models.blocks import recompute
from models.cpm_live.config import BeeConfig
from models.cpm_live.layers import LiveModel, RowScores
from models.cpm_live.scores import bee_scores

__all__ = ["BeeConfig", "CPMBee", "bee_scores", "check_subs"]

_STEP = 16  # positions by which a sub-id of 1 rotates
_THETA = 10000.0
_FP16_SUBS = 4095  # 16 times this is inf in fp16
_ROTATED_AT_ONCE = 4096  # tokens


class CPMBee(LiveModel):
    """CPM-Bee over this rank's part of rows. LiveModel has its parts."""

    config: BeeConfig

    def forward(
        self,
        tokens: Tensor,
        subs: Tensor,
        ext_tokens: Tensor,
        ext_subs: Tensor,
        scores: RowScores | None = None,
        labels: Tensor | None = None,
        layout: Layouts | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute logits (B, S, V + N), or the loss if there are labels. All inputs are integers.

        The first V logits are of words, the others of the N tokens with sub-ids.

        tokens, subs          (B, S) and their sub-ids
        ext_tokens, ext_subs  (N,), identical on all ranks that share rows: tokens with sub-ids that
                              can be predicted. Label V + i is the i-th
        scores                `bee_scores` of each whole row

        LiveModel explains the other arguments. Raises as check_subs, for ext_subs on all ranks.
        """
        for each in (ext_subs, subs):
            check_subs(self.config, each)
        words = self.input_embedding.weight
        hidden = self.encode(self.embed(tokens, subs, words), scores, layout, cache, rows)
        extended = self._rotate(F.embedding(ext_tokens, words), ext_subs)
        return self.predict(hidden, [words, extended], labels, by_row)

    def embed(self, tokens: Tensor, subs: Tensor, words: Tensor) -> Tensor:
        """Compute the encoder's input, (B, S, E), from tokens and sub-ids (B, S)."""
        return self._rotate(self.look_up(tokens, words), subs)

    def _rotate(self, x: Tensor, subs: Tensor) -> Tensor:
        """Rotate x (..., E) by its sub-ids (...).

        Angles are fp64. With their sines and cosines they take many times the memory of x.
        Therefore only some tokens are rotated at a time, and again in the backward.
        """
        parts = (flat.split(_ROTATED_AT_ONCE) for flat in (x.flatten(0, -2), subs.flatten()))
        in_fp16 = self.config.fp16_rotary
        rotated = [recompute(_rotate, *pair, in_fp16) for pair in zip(*parts, strict=True)]
        return torch.cat(rotated).view(x.shape)


def check_subs(config: BeeConfig, subs: Tensor) -> None:
    """Check that fp16_rotary can represent sub-ids of any shape. Otherwise their sines are NaN.

    Raises ValueError. On GPUs it is a device-side assertion, for which the host does not wait.
    """
    if not config.fp16_rotary:
        return
    fits, limit = (subs < _FP16_SUBS).all(), f"fp16_rotary holds sub-ids below {_FP16_SUBS}"
    if subs.is_cuda:
        torch._assert_async(fits, limit)
    elif not fits:
        most = int(subs.max())
        raise ValueError(f"{limit}, got {most}: train with fp16_rotary false in the configuration")


def _rotate(x: Tensor, subs: Tensor, in_fp16: bool) -> Tensor:
    """Rotate x (N, E) by sub-ids (N,)."""
    tables = _fp16_tables if in_fp16 else rope_tables
    return apply_rope(x.unsqueeze(-2), *tables(subs * _STEP, x.shape[-1], _THETA)).squeeze(-2)


def _fp16_tables(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Compute `rope_tables` rounded to fp16: at sub-id 64 angles are off by up to 0.25 rad."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    phases = (positions.half().unsqueeze(-1) * (theta**-exponents).half()).float()
    return phases.cos().half().float(), phases.sin().half().float()
