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
from torch.distributed.fsdp import FSDPModule

from ...base.compiled import not_compiled
from ...calls.refusal import bind_arguments
from ...loss import cross_entropy_sum
from ...ranks.agreement import agree, run_together
from ...ranks.sequence_parallel import SequenceParallel, check_sp
from ...sequence.layout import IGNORE_INDEX
from ..enabling import put_before
from .attention import refuse_part
from .configs import check_configs
from .inputs import ForwardInputs
from .requests import WantedOutputs, warn_once

# fields of TRL's fused head with one number for each token
_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Enabled(nn.Module):
    """An enabled object. Its copies and pickles are enabled too."""

    _is_plain = False  # whether it computes as one of its own class, alone

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple:
        return _new, type(self).__bases__, self.__getstate__()


class EnabledModel(Enabled):
    """A model over the ranks of `_sp`. Its forward takes whole sequences.

    `_forward` and `_fused` are the forwards that packages set on the model, bound to it, or None:
    accelerate's autocast, and TRL's fused head for calls with fused_lm_head. Copies have them.
    Pickles do not, as those of plain models.
    """

    has_head = True

    # set by enable
    _sp: SequenceParallel
    _balanced: bool
    _with_targets: WantedOutputs | None  # what calls with targets return by default
    _without_targets: WantedOutputs | None  # what others do; a trainer or an accelerator sets it
    _folds = False  # whether calls with TRL's fused head fold rows that share prefixes
    _options: dict[str, Any]
    _forward: Callable | None
    _fused: Callable | None
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
        own: Any = cls.__bases__[0]
        base: Any = cls.__bases__[-1]
        if EnabledModel not in own.__bases__:
            return  # one of these, or a subclass of such a class, as FSDP2 makes them
        own_forward = base.forward

        @functools.wraps(own_forward)
        def forward(self: EnabledModel, *args: Any, **named: Any) -> Any:
            of_class = functools.partial(own_forward, self)
            if self._is_plain:
                _refuse_in_plain(type(self).__name__, named)
                set_by_package = self._fused if named.get("fused_lm_head") else self._forward
                return (set_by_package or of_class)(*args, **named)
            inputs, part = self._prepare(of_class, args, named)
            set_by_package = self._fused if inputs.fused else self._forward
            return self._finish((set_by_package or of_class)(**part), inputs)

        # without __wrapped__, which accelerate's unwrap_model would call instead of this forward
        vars(forward)["__signature__"] = inspect.signature(own_forward)
        del vars(forward)["__wrapped__"]
        cls.forward = forward

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("_forward", "_fused"):
            # a pickle names a method, and this name is the enabled forward's now
            if getattr(vars(self)[name], "__func__", None) is type(self).forward:
                setattr(self, name, None)

    @not_compiled
    def _prepare(
        self, own: Callable, args: tuple, named: dict[str, Any]
    ) -> tuple[ForwardInputs, dict[str, Any]]:
        """Return the inputs, and the arguments of the model's own forward, once all ranks agree."""

        @functools.cache
        def read_inputs() -> ForwardInputs:
            check_configs(self)
            arguments = _bind(f"{type(self).__name__}.forward", own, args, named)
            if arguments.get("fused_lm_head") and self._fused is None:
                raise ValueError(
                    f"fused_lm_head: this {type(self).__name__} had no fused head when it was "
                    "enabled; call TRL's add_fused_lm_head before enable"
                )
            return ForwardInputs(self, arguments)

        doing = f"the forward of a {type(self).__name__}"
        agree(self._sp.rings, "", lambda: read_inputs().terms, but=("tokens",), doing=doing)
        inputs = read_inputs()
        if inputs.unasked and self.has_head and self._sp.rank == 0:
            self._warn_of_logits(inputs)
        for module in self.modules():
            if isinstance(module, EnabledRotary):
                module._last = inputs.last_position
        part = inputs.part | {"bmt_burst": inputs}
        # outputs are changed by name
        by_name = inputs.whole or inputs.loss_only
        return inputs, part | {"return_dict": True} if by_name else part

    def _warn_of_logits(self, inputs: ForwardInputs) -> None:
        """Warn once of what whole logits cost that nobody asked for by name."""
        assert inputs.targets is not None, "other calls ask for whole logits"
        numbers = inputs.targets.numel() * self.config.vocab_size
        warn_once(
            "whole logits",
            f"whole logits of a {type(self).__name__}, {4 * numbers / 2**30:.3g} GiB on each rank "
            "in fp32, are made, since the code that calls it may read them. If it reads only the "
            "loss, pass loss_only=True to sequence_parallel. If it needs whole logits, pass "
            "whole_outputs=True to the model to silence this",
        )

    @not_compiled
    def _finish(self, out: Any, inputs: ForwardInputs) -> Any:
        """Return the outputs of the model's own forward, whole if that was asked for."""
        if inputs.fused:
            return _join_fused(out, inputs)
        if not inputs.whole and not inputs.loss_only:
            return out
        if inputs.loss_only and "logits" in out:
            out["logits"] = None
        if inputs.whole:
            for name in ("logits", "last_hidden_state"):
                if out.get(name) is not None:
                    out[name] = inputs.sequence.unshard(out[name])
            if out.get("hidden_states") is not None:
                out["hidden_states"] = tuple(map(inputs.sequence.unshard, out["hidden_states"]))
        wants_dict = inputs.arguments.get("return_dict", getattr(self.config, "return_dict", True))
        return out if wants_dict else out.to_tuple()

    def set_attn_implementation(self, *_args: Any, **_named: Any) -> NoReturn:
        raise ValueError(
            f"an enabled {type(self).__name__} keeps its attention, since others see only this "
            "rank's tokens: choose kernels by the flash of enable, or load what save_pretrained "
            "writes into a model that is not enabled"
        )


class EnabledBase(EnabledModel):
    """A model without a head, such as LlamaModel. Its hidden states are always whole, so that any
    head or pooling above it works unchanged.
    """

    has_head = False


class EnabledCausalLM(EnabledModel):
    """A causal language model."""

    @property
    def loss_function(self) -> Callable:
        """The loss, which the model's forward calls with this rank's part."""
        own: Any = super()
        return own.loss_function if self._is_plain else self._loss

    @not_compiled
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        bmt_burst: ForwardInputs,
        num_items_in_batch: Tensor | int | None = None,
        **_others: Any,
    ) -> Tensor:
        """Compute the mean over the targets of all ranks, of logits (B, S_local, V) and shifted
        targets (B, S_local).
        """
        doing, labels = f"the loss of a {type(self).__name__}", labels.to(logits.device)
        smoothing = bmt_burst.label_smoothing
        total, _ = run_together(
            self._sp.rings, doing, lambda: cross_entropy_sum(logits, labels, smoothing)
        )
        count = bmt_burst.num_targets if num_items_in_batch is None else num_items_in_batch
        count = count.to(total.device).reshape(()) if isinstance(count, Tensor) else count
        return self._sp.sum(total / count)

    def generate(self, *args: Any, **named: Any) -> Any:
        """Generate within `plain`. Ranks of FSDP2 take equally many steps."""
        if not self._is_plain:
            raise ValueError(
                f"an enabled {type(self).__name__} does not generate, since caches need whole "
                "sequences: call it in `with plain(model):`, or load what save_pretrained writes "
                "into a model that is not enabled"
            )
        if any(isinstance(x, FSDPModule) for x in self.modules()):
            named = {"synced_gpus": True} | named
        own: Any = super()
        return own.generate(*args, **named)


class EnabledRotary(Enabled):
    """Rotary embeddings with angles that depend on the longest sequence, which is cut over ranks.

    `_last` is the last position of all sequences, once the model was called.
    """

    _last: Tensor | None = None

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if self._is_plain:
            return super().forward(x, position_ids, *args, **named)
        if self._last is None:
            refuse_part(self)
        last = self._last.to(position_ids).expand(len(position_ids), 1)
        cos, sin = super().forward(x, torch.cat((position_ids, last), 1), *args, **named)
        return cos[:, :-1], sin[:, :-1]


def _join_fused(out: Any, inputs: ForwardInputs) -> Any:
    """Return TRL's FusedCausalLMOutput of whole rows, from `out` of this rank's tokens.

    Its fields are (B, S) if shift_labels were given. With labels they are (B, S - 1), without the
    last token, which has no target. The loss is the sum of the negative log_probs, divided as TRL
    does.
    """
    names = [name for name in _FUSED if getattr(out, name) is not None]
    mine = [getattr(out, name) for name in names]
    # one exchange for all of them, in the dtype of log_probs
    stacked = torch.stack([x.to(mine[0].dtype) for x in mine], -1)
    joined = inputs.sequence.unshard(stacked)
    if inputs.folded is not None:
        joined = inputs.folded.unfold(joined)
    targets = inputs.targets
    assert targets is not None, "checked with the arguments"
    columns = slice(None) if "shift_labels" in inputs.arguments else slice(-1)
    # copies, since autograd refuses changes in place of one of several views
    fields = {
        name: (whole if x.requires_grad else whole.detach()).to(x.dtype)[:, columns].clone()
        for name, x, whole in zip(names, mine, joined.unbind(-1), strict=True)
    }
    mask = targets[:, columns].ne(IGNORE_INDEX).to(stacked.device)
    count = inputs.arguments.get("num_items_in_batch")
    if count is None:
        count = mask.sum().clamp(min=1)
    loss = -fields["log_probs"].sum() / count
    return type(out)(loss=loss, **fields, label_mask=mask)


def _refuse_in_plain(name: str, named: dict[str, Any]) -> None:
    """Raise ValueError for arguments that a model's own forward would take and ignore."""
    mask, smoothing = named.get("mask"), named.get("label_smoothing")
    # a mask may be a tensor, which has no truth value
    for given, is_given in (("mask", mask is not None), ("label_smoothing", smoothing)):
        if is_given:
            raise ValueError(
                f"within plain a {name} computes as one of transformers', which has no {given}: "
                "expected it outside of plain"
            )


def _new(own: type, base: type) -> nn.Module:
    enabled: type[nn.Module] = put_before(own, base)
    return enabled.__new__(enabled)


def _bind(name: str, function: Callable, args: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the function `name`, by their names."""
    signature = inspect.signature(function)
    arguments = bind_arguments(name, signature, args, named).arguments
    [*_, last] = signature.parameters.values()  # only the last one may have any names
    rest = arguments.pop(last.name, {}) if last.kind is last.VAR_KEYWORD else {}
    return arguments | rest
