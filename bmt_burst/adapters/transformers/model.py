"""Models and modules of transformers that are enabled.

Each class is put before the object's own class, and shares its attributes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from ...base.compiled import not_compiled
from ...calls.refusal import bind_arguments
from ...loss import cross_entropy_sum
from ...ranks.agreement import gather_terms, read_equal_terms, run_together
from ...ranks.rings import make_rings
from ...ranks.sequence_parallel import SequenceParallel
from ...sparse.memory import Choices
from ..enabling import check_sp, put_before
from .attention import ForwardContext
from .configs import check_configs
from .inputs import ForwardInputs


class Enabled(nn.Module):
    """An enabled object. Its copies and pickles are enabled too."""

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple:
        return _new, type(self).__bases__, self.__getstate__()


class EnabledModel(Enabled):
    """A causal language model over the ranks of `_sp`."""

    # set by enable
    _sp: SequenceParallel
    _balanced: bool
    _options: dict[str, Any]
    # attributes of the model
    config: Any
    get_input_embeddings: Callable[[], nn.Module]

    def __init__(self, *_args: Any, **_named: Any):
        raise TypeError(
            f"the class of an enabled {type(self).__name__} makes no other models: make one with "
            "transformers' own class, and enable it"
        )

    def attach(self, sp: SequenceParallel) -> None:
        """Run this model over the ranks of `sp`, for example after it was read from a pickle.

        Raises TypeError if sp is not a SequenceParallel.
        """
        check_sp(sp)
        self._sp = sp

    def __init_subclass__(cls) -> None:
        """Give the class that is put before a model's own a forward with the same signature, which
        Trainers read.
        """
        super().__init_subclass__()
        if EnabledModel not in cls.__bases__:
            return  # a subclass of such a class, as FSDP2 makes them
        base: Any = cls.__bases__[-1]
        own = base.forward

        @functools.wraps(own)
        def forward(self: EnabledModel, *args: Any, **named: Any) -> Any:
            of_model = functools.partial(own, self)
            return of_model(**self._prepare(of_model, args, named))

        cls.forward = forward

    @not_compiled
    def _prepare(self, own: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's own forward, after all ranks agree."""

        @functools.cache
        def read_inputs() -> ForwardInputs:
            check_configs(self)
            arguments = _bind(f"{type(self).__name__}.forward", own, args, named)
            vocabulary = self._vocabulary()
            return ForwardInputs(self._sp, self._balanced, self.config, vocabulary, arguments)

        rings = make_rings(self._sp.process_group, self._sp.double_group)
        doing = f"the forward of a {type(self).__name__}"
        read_equal_terms(gather_terms(rings, doing, lambda: read_inputs().terms), but=("tokens",))
        inputs = read_inputs()
        for module in self.modules():
            if isinstance(module, EnabledRotary):
                module._last = inputs.last_position
        context = ForwardContext(
            self._options | self._sp.groups | inputs.masking,
            inputs.seq_len,
            inputs.num_targets,
            Choices(),
        )
        return inputs.part | {"bmt_burst": context}

    def _vocabulary(self) -> int | None:
        """Return the number of embeddings. None if torch's Embedding does not look them up."""
        embedding = self.get_input_embeddings()
        return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None

    @property
    def loss_function(self) -> Callable:
        """The loss, which the model's forward calls with this rank's part."""
        return self._loss

    @not_compiled
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        bmt_burst: ForwardContext,
        num_items_in_batch: Tensor | int | None = None,
        **_others: Any,
    ) -> Tensor:
        """Compute the mean over the targets of all ranks, of logits (B, S_local, V) and shifted
        targets (B, S_local).
        """
        rings = make_rings(self._sp.process_group, self._sp.double_group)
        doing = f"the loss of a {type(self).__name__}"
        total, _ = run_together(
            rings, doing, lambda: cross_entropy_sum(logits, labels.to(logits.device))
        )
        count = bmt_burst.num_targets if num_items_in_batch is None else num_items_in_batch
        count = count.to(total.device).reshape(()) if isinstance(count, Tensor) else count
        return self._sp.sum(total / count)

    def generate(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} does not generate, since caches need whole "
            "sequences: load what save_pretrained writes into a model that is not enabled"
        )

    def set_attn_implementation(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} keeps its attention, since others see only this "
            "rank's tokens: choose kernels by the flash of enable, or load what save_pretrained "
            "writes into a model that is not enabled"
        )


class EnabledRotary(Enabled):
    """Rotary embeddings with angles that depend on the longest sequence, which is cut over ranks.

    `_last` is the last position of all sequences, once the model was called.
    """

    _last: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        if self._last is None:
            raise TypeError(
                f"a {type(self).__name__} was called without its model: call the model that was "
                "enabled"
            )
        last = self._last.to(position_ids).expand(len(position_ids), 1)
        cos, sin = super().forward(x, position_ids=torch.cat((position_ids, last), 1), **named)
        return cos[:, :-1], sin[:, :-1]


def _new(own: type, base: type) -> nn.Module:
    enabled = put_before(own, base)
    return enabled.__new__(enabled)


def _bind(name: str, function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the function `name`, by their names."""
    signature = inspect.signature(function)
    arguments = bind_arguments(name, signature, args, named).arguments
    [*_, last] = signature.parameters.values()  # only the last one may have any names
    rest = arguments.pop(last.name, {}) if last.kind is last.VAR_KEYWORD else {}
    return arguments | rest
