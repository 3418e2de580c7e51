"""CPM-Bee: nested data as text. Every token has a segment in a tree, and special tokens have
sub-ids that rotate them.

    scores = [bee_scores(config, *fields_of_row) for ...]       # of whole rows, on the CPU
    loss, count = model(tokens, subs, ext_tokens, ext_subs, scores, labels)

Parameters have CPM-Live's names and shapes: its checkpoints load as they are.

Letters: B batch, S tokens of this rank, V vocabulary, N tokens with sub-ids, E dim_model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bmt_burst.nn import KVCache, Layouts, apply_rope, rope_tables
from models.blocks import recomputed
from models.cpm_live.config import BeeConfig
from models.cpm_live.layers import LiveModel, RowScores
from models.cpm_live.scores import bee_scores

__all__ = ["BeeConfig", "CPMBee", "bee_scores", "check_subs"]

_STEP = 16  # positions that a sub-id turns a token by
_THETA = 10000.0
_FP16_SUBS = 4095  # whose 16-fold is rounded to infinity
_TURNED_AT_ONCE = 4096  # tokens


class CPMBee(LiveModel):
    """CPM-Bee over this rank's part of rows; see LiveModel for what it is made of."""

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
        cache: KVCache | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens and their sub-ids (B, S) to logits (B, S, V + N): those of words, then those of
        the N extended ones.

        With `labels` (B, S), already shifted, IGNORE_INDEX where there is no target: to the sum of
        token losses (fp32) and the number of targets instead. All are integers.

        ext_tokens, ext_subs  (N,), the same on all ranks that share rows: tokens with sub-ids that
                              can be predicted; label V + i is the i-th
        scores                `bee_scores` of the whole rows, for each
        layout                how the rows lie on the ranks, or one for each row; by default sp's
        cache, rows           for generation, see LiveModel.encoded

        Raises as check_subs, for ext_subs on all ranks.
        """
        for each in (ext_subs, subs):
            check_subs(self.config, each)
        words = self.input_embedding.weight
        hidden = self.encoded(self.embedded(tokens, subs, words), scores, layout, cache, rows)
        extended = self._turned(F.embedding(ext_tokens, words), ext_subs)
        return self.predicted(hidden, [words, extended], labels)

    def embedded(self, tokens: Tensor, subs: Tensor, words: Tensor) -> Tensor:
        """tokens and sub-ids (B, S) to what the encoder takes, (B, S, E)."""
        return self._turned(self.looked_up(tokens, words), subs)

    def _turned(self, x: Tensor, subs: Tensor) -> Tensor:
        """x (..., E) turned by its sub-ids (...).

        Angles are fp64, with their sines and cosines many times the memory of x: they are made of
        some tokens at a time, and again in the backward.
        """
        parts = zip(
            x.flatten(0, -2).split(_TURNED_AT_ONCE),
            subs.flatten().split(_TURNED_AT_ONCE),
            strict=True,
        )
        turned = [recomputed(_turned, part, its, self.config.fp16_rotary) for part, its in parts]
        return torch.cat(turned).view(x.shape)


def check_subs(config: BeeConfig, subs: Tensor) -> None:
    """Raises ValueError for sub-ids (any shape) that fp16_rotary does not hold: their sines would
    be NaN.

    On GPUs, where the host does not wait for it, that is a device-side assertion.
    """
    if not config.fp16_rotary:
        return
    fits, limit = (subs < _FP16_SUBS).all(), f"fp16_rotary holds sub-ids below {_FP16_SUBS}"
    if subs.is_cuda:
        torch._assert_async(fits, limit)
    elif not fits:
        raise ValueError(
            f"{limit}, got {int(subs.max())}: train with fp16_rotary false in the model's configuration"
        )


def _turned(x: Tensor, subs: Tensor, in_fp16: bool) -> Tensor:
    tables = _fp16_tables if in_fp16 else rope_tables
    return apply_rope(x.unsqueeze(-2), *tables(subs * _STEP, x.shape[-1], _THETA)).squeeze(-2)


def _fp16_tables(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """`rope_tables` with every step rounded to fp16: angles are off by up to 0.25 rad at sub-id 64."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    phases = (positions.half().unsqueeze(-1) * (theta**-exponents).half()).float()
    return phases.cos().half().float(), phases.sin().half().float()
