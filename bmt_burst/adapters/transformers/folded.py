"""The rows of a batch that share prefixes, such as a prompt's completions, as one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...folding import fold_prefixes
from ...sequence.layout import IGNORE_INDEX
from ...sequence.mask import Mask


class FoldedRows:
    """Rows (B, S) as one sequence of S_folded tokens.

    tokens   (1, S_folded) int64
    targets  (1, S_folded) int64: those of the rows, -100 where none of them has one
    mask     the trees of the rows

    targets (B, S) have -100 where nothing is computed. `masks` are the documents of all rows or of
    each, without padding. A document counts as a row, and its positions begin at 0. `positions`
    (B, S) or (1, S) are those that the caller gave.

    Raises ValueError if rows have different targets where they share tokens, if padding has a
    target, and unless `positions` rise by one in each document.
    """

    def __init__(
        self,
        tokens: Tensor,
        targets: Tensor,
        masks: Sequence[Mask],
        positions: Tensor | None = None,
    ):
        of_rows = [*masks] * (len(tokens) // len(masks))
        documents = [(row, *part.kv) for row, x in enumerate(of_rows) for part in x.slices]
        ids = tokens.cpu()
        if positions is not None:
            steps = positions.cpu().expand(ids.shape).diff(dim=1)
            if any(steps[row, start : stop - 1].ne(1).any() for row, start, stop in documents):
                raise ValueError(
                    "fold counts positions in each document: expected position_ids that rise by "
                    "one there, got others; leave position_ids or fold out"
                )
        folded = fold_prefixes([ids[row, start:stop] for row, start, stop in documents])
        places = torch.full(ids.shape, -1)  # of padding
        for (row, start, stop), found in zip(documents, folded.places, strict=True):
            places[row, start:stop] = found
        self.tokens, self.mask = folded.tokens.to(tokens), folded.mask
        self._places = places.to(tokens.device)
        self._is_target = targets.ne(IGNORE_INDEX).to(tokens.device)
        is_wrong = (self._is_target & self._places.lt(0)).any(1)
        if is_wrong.any():
            raise ValueError(
                f"fold: row {int(is_wrong.nonzero()[0])} has a label behind padding, which no "
                f"token predicts: expected {IGNORE_INDEX}, as for the first token of a row"
            )
        wanted = self._places[self._is_target], targets.to(tokens.device)[self._is_target]
        self.targets = torch.full_like(self.tokens, IGNORE_INDEX)
        self.targets[0, wanted[0]] = wanted[1].to(self.targets)
        if self.targets[0, wanted[0]].ne(wanted[1]).any():
            raise ValueError(
                "fold: rows that share tokens have different labels there: expected the next "
                f"tokens, or {IGNORE_INDEX}"
            )

    def unfold(self, x: Tensor) -> Tensor:
        """Return the values of each row's targets, (B, S, ...) of x (1, S_folded, ...), and 0
        elsewhere. Gradients of x are sums over the rows.
        """
        rows = x[0][self._places]
        is_other = ~self._is_target
        return rows.masked_fill(is_other.reshape(*is_other.shape, *[1] * (rows.dim() - 2)), 0)
