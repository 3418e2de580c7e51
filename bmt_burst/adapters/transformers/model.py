"""Models and modules of transformers that are enabled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...base.compiled import not_compiled
from ...loss import cross_entropy_sum
from ...ranks.agreement import run_together
from ...ranks.groups import SequenceParallel
from ...ranks.rings import make_rings
from ..batch import Given, agree
from .attention import Sight
from .configs import _check_configs
from .inputs import _Call


class _InPlace:
    """Comes before the class of an object that is enabled. Copies, and what is read from pickles,
    are enabled too.
    """

    def __reduce_ex__(self, _protocol: int) -> tuple:
        return _new, type(self).__bases__, self.__getstate__()


class _Model(_InPlace):
    """A causal language model over the ranks of `_sp`."""

    def __init__(self, *_args: Any, **_named: Any):
        raise TypeError(
            f"another {type(self).__name__} cannot be made by the class of an enabled one: take transformers' own, and "
            "enable what it makes"
        )

    def _over_ranks(self, own: Callable, args: tuple, named: dict[str, Any]) -> Any:
        """The model's own forward, of this rank's tokens; see the module."""
        return own(**self._part(own, args, named))

    @not_compiled
    def _part(self, own: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
        """What the model's own forward takes, once all ranks agree."""
        call: _Call | None = None

        def part() -> Given:
            nonlocal call
            _check_configs(self)
            call = _Call(
                self._sp, self._balanced, self.config, self._vocabulary(), _bound(own, args, named)
            )
            return call.given

        batch = agree(self._sp, f"the forward of a {type(self).__name__}", part)
        options = self._options | self._sp.groups | batch.masking(causal=True, padding_sees=False)
        for module in self.modules():
            if isinstance(module, _Rotary):
                module._last = call.last_position
        return call.part | {"bmt_burst": Sight(options, call.seq_len, call.targets)}

    def _vocabulary(self) -> int | None:
        """How many tokens there are embeddings of; None if it is not torch's Embedding that looks
        them up.
        """
        embedding = self.get_input_embeddings()
        return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None

    @property
    def loss_function(self) -> Callable:
        """What the model's forward calls with this rank's part."""
        return self._loss

    @not_compiled
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        bmt_burst: Sight,
        num_items_in_batch: Tensor | int | None = None,
        **_others: Any,
    ) -> Tensor:
        """logits (B, S_local, V) and their targets (B, S_local), shifted, to the mean over the
        targets of all ranks.
        """
        rings = make_rings(self._sp.process_group, self._sp.double_group)
        doing = f"the loss of a {type(self).__name__}"
        total, _ = run_together(
            rings, doing, lambda: cross_entropy_sum(logits, labels.to(logits.device))
        )
        count = bmt_burst.targets if num_items_in_batch is None else num_items_in_batch
        count = count.to(total.device).reshape(()) if isinstance(count, Tensor) else count
        return _Joined.apply(total / count, self._sp)

    def generate(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} does not generate, since caches are of whole sequences: load what "
            "save_pretrained writes into a model that is not enabled"
        )

    def set_attn_implementation(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} keeps its attention, since others see this rank's tokens alone: choose "
            "kernels by the flash of enable, or load what save_pretrained writes into a model that is not enabled"
        )


class _Rotary(_InPlace):
    """One whose angles depend on how long the longest sequence is, of which this rank has a part.

    `_last` is the last position of all.
    """

    _last: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        if self._last is None:
            raise TypeError(
                f"a {type(self).__name__} was called by itself: call the model that was enabled"
            )
        last = self._last.to(position_ids).expand(len(position_ids), 1)
        cos, sin = super().forward(x, position_ids=torch.cat((position_ids, last), 1), **named)
        return cos[:, :-1], sin[:, :-1]


class _Joined(torch.autograd.Function):
    """The sum of what the ranks of sp have, on each of them. Gradients are the ranks' own, times
    their number.
    """

    @staticmethod
    def forward(ctx, share: Tensor, sp: SequenceParallel) -> Tensor:
        ctx.size = sp.size
        return sp.with_layout("contiguous").unshard(share.reshape(1), sp.size, 0).sum()

    @staticmethod
    def backward(ctx, dsum: Tensor) -> tuple[Tensor, None]:
        return dsum * ctx.size, None


@functools.cache
def _enabled(own: type[_InPlace], base: type[nn.Module]) -> type[nn.Module]:
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    if own is _Model:

        @functools.wraps(base.forward)  # Trainers read its signature
        def forward(self, *args: Any, **named: Any) -> Any:
            return self._over_ranks(functools.partial(base.forward, self), args, named)

        names["forward"] = forward
    return type(base.__name__, (own, base), names)


def _new(own: type[_InPlace], base: type[nn.Module]) -> nn.Module:
    enabled = _enabled(own, base)
    return enabled.__new__(enabled)


def _bound(function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    signature = inspect.signature(function)
    arguments = signature.bind(*args, **named).arguments
    rest = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), None)
    return {**{name: x for name, x in arguments.items() if name != rest}, **arguments.get(rest, {})}
