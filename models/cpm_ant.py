"""CPM-Ant: text in segments of several types, after a learned prompt for the task.

    scores = [ant_scores(config, *fields_of_row) for ...]       # of whole rows, on the CPU
    loss, count = model(tokens, segments, positions, scores, labels)

Parameters have CPM-Live's names and shapes: its checkpoints load as they are.

Letters: B batch, S tokens of this rank, V vocabulary, E dim_model.
"""

from __future__ import annotations

from torch import Tensor, nn

from bmt_burst import Cache
from bmt_burst.nn import Layouts
from models.cpm_live.config import AntConfig
from models.cpm_live.layers import LiveModel, RowScores
from models.cpm_live.scores import ant_scores

__all__ = ["AntConfig", "CPMAnt", "ant_scores"]


class CPMAnt(LiveModel):
    """CPM-Ant over this rank's part of rows. LiveModel has its parts."""

    config: AntConfig

    def __init__(self, config: AntConfig, *args, **options):
        super().__init__(config, *args, **options)
        self.prompt_embedding = nn.Embedding(
            config.prompt_types * config.prompt_length, config.dim_model
        )
        self.segment_embedding = nn.Embedding(config.segment_types, config.dim_model)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor,
        positions: Tensor,
        scores: RowScores | None = None,
        labels: Tensor | None = None,
        layout: Layouts | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute logits (B, S, V), or the loss if there are labels. All inputs are integers.

        tokens, segments  (B, S) and the types of their segments
        positions         (S,) or (B, S), positions in the whole rows: only the first prompt_length
                          tokens are looked up among the prompts
        scores            `ant_scores` of each whole row

        LiveModel explains the other arguments.
        """
        words = self.input_embedding.weight
        hidden = self.encode(
            self.embed(tokens, segments, positions, words), scores, layout, cache, rows
        )
        return self.predict(hidden, [words], labels, by_row)

    def embed(self, tokens: Tensor, segments: Tensor, positions: Tensor, words: Tensor) -> Tensor:
        """Compute the encoder's input, (B, S, E)."""
        is_prompt = positions < self.config.prompt_length
        from_words = self.look_up(tokens.where(~is_prompt, 0), words)
        from_prompts = self.look_up(tokens.where(is_prompt, 0), self.prompt_embedding.weight)
        x = from_prompts.where(is_prompt.unsqueeze(-1), from_words)
        return x + self.look_up(segments, self.segment_embedding.weight)
