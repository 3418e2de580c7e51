"""The base of chunks and caches, in which layers keep what later tokens need.

Letters: B batch, S tokens, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from ..base.autocast import autocast_inputs
from ..base.compiled import not_compiled
from ..extensions import find_kind
from ..memories.protocol import Kind
from ..ranks.agreement import refuse
from ..ranks.sequence_parallel import OF_LAYER, SequenceParallel, check_kind


class KeptPart(ABC):
    """A part of a sequence in which layers keep what later tokens need."""

    sp: SequenceParallel

    @not_compiled
    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, **options: Any
    ) -> Tensor:
        """Keep k and v, and return the attention of q to all tokens so far: (B, S, H, D), in q's
        dtype or autocast's.

        layer    the number of the layer, 0 to `layers` - 1
        q        (B, S, H, D): of a chunk this rank's tokens, of a Cache all new ones, without
                 gradient
        k, v     (B, S, G, D)
        window   as nn.BurstAttention's
        options  as burst_attn_func's: softcap, sinks, sparse, choose_by, flash, strategy and
                 deterministic. New tokens of a Cache ignore the last three, and are deterministic

        Raises ValueError or TypeError on all ranks if an input is wrong or does not fit the earlier
        calls of the layer, if the layer or chunk has no turn now, and if a Cache is full.
        """
        try:
            kind, tensors = find_kind(window, options)
        except (TypeError, ValueError) as error:
            self.refuse(error)
        return self.mix(layer, kind, q, k, v, *tensors)

    @not_compiled
    def mix(self, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tensor:
        """Do what `attend` does, for any kind of layer."""
        try:
            check_kind(kind, tensors)
            compute = self._prepare(layer, kind, *autocast_inputs(q, k, v), *tensors)
        except (TypeError, ValueError, AttributeError) as error:
            self.refuse(error)
        return compute()

    @abstractmethod
    def _prepare(
        self, layer: int, kind: Kind, q: Tensor, k: Tensor, v: Tensor, *tensors: Any
    ) -> Callable[[], Tensor]:
        """Return a function that all ranks call together, and that returns the attention. Raises
        ValueError or TypeError for wrong inputs, on this rank only.
        """

    def refuse(self, error: Exception, doing: str = OF_LAYER) -> NoReturn:
        """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree."""
        refuse(self.sp.rings, doing, error)
