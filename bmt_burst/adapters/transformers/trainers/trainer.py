"""A Trainer in which groups of ranks share each sequence."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import transformers.trainer
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from ....ranks.agreement import agree
from ....ranks.rings import Rings
from ....ranks.sequence_parallel import SequenceParallel
from ....sequence.layout import shift_labels
from ....transport import ALONE
from ....transport.torch_dist import torch_transport, world_group
from ...enabling import make_class, replaced
from ..model import EnabledCausalLM
from ..requests import WantedOutputs, ask_models
from .accelerator import ParallelAccelerator
from .models import find_enabled
from .options import Options, is_tested

# Arguments that may differ between ranks. Others decide when ranks exchange something.
_OF_A_RANK = {
    *("local_rank", "output_dir", "logging_dir", "run_name", "hub_token", "distributed_state"),
    *("_n_gpu", "log_level", "log_level_replica", "report_to", "disable_tqdm", "device_map"),
    *("fsdp_plugin_args", "dataloader_num_workers", "resume_from_checkpoint", "project"),
}


class ParallelTrainer(Trainer):
    """The methods of a Trainer that count a group of ranks as one process."""

    label_smoother: Any
    _sp_options: Options

    @property
    def sp(self) -> SequenceParallel:
        """The ranks that share this rank's sequences."""
        return self.accelerator.sp

    def create_accelerator_and_postprocess(self) -> None:
        before = getattr(self, "accelerator", None)  # in a search of hyperparameters
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.__class__ = make_class(
            ParallelAccelerator, type(accelerator), _sp_options=self._sp_options
        )
        accelerator._make_groups(None if before is None else before.sp)
        # transformers keeps a bound method of the class before
        self.gather_function = functools.partial(
            accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if self.sp.size > 1:
            world = Rings(torch_transport(world_group()), ALONE)
            agree(world, f"{type(self).__name__}.__init__", self._describe_arguments)
            if self.is_fsdp_enabled and hasattr(self.args, "model_init_kwargs"):
                # TRL's default for a reference model would spread it over all GPUs, in each process
                given = self.args.model_init_kwargs or {}
                self.args.model_init_kwargs = {"device_map": None, **given}

    def _describe_arguments(self) -> dict[str, str]:
        """Return what all ranks must pass alike, once it was checked."""
        _check_arguments(self.args, self.model)
        found = {}
        for field in dataclasses.fields(self.args):
            value = getattr(self.args, field.name)
            text = repr(getattr(value, "value", value))  # of enumerations
            is_shown = field.name not in _OF_A_RANK and " at 0x" not in text
            if is_shown and value != field.default and not isinstance(value, set):
                found[field.name] = text
        return found

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.sp.size

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        # Trainers add up those of all ranks.
        return super().floating_point_ops(inputs) / self.sp.size

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        given = {**dict(zip(("return_outputs", "num_items_in_batch"), args, strict=False)), **named}
        outputs = None
        self._enable_reference()
        if self.sp.size > 1:
            outputs = self._choose_outputs(model)
            if outputs is not WantedOutputs.WHOLE_FOR_OTHERS:
                inputs = self._smooth_over_ranks(model, inputs, given.get("num_items_in_batch"))
                outputs = None if given.get("return_outputs") else outputs
        with ask_models(outputs):
            return super().compute_loss(model, inputs, *args, **named)

    def _enable_reference(self) -> None:
        """Enable TRL's reference model, which TRL shards itself for FSDP."""
        reference = getattr(self, "ref_model", None)
        if reference is not None and find_enabled(reference) is None:
            self.accelerator._enable(reference)

    def training_step(self, model: nn.Module, *args: Any, **named: Any) -> Tensor:
        # A backward may compute a forward again.
        with ask_models(self._choose_outputs(model)):
            return super().training_step(model, *args, **named)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        # A rank that ended in a callback, or calls the model there, would leave the others waiting
        # in torch's own gather of the losses to log.
        self.accelerator._meet("the end of a step")
        super()._maybe_log_save_evaluate(*args, **named)

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        # DPOTrainer calls it before it prepares the model.
        self.accelerator._enable(model)
        return super().compute_ref_log_probs(model, inputs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        of_loss = self._choose_outputs(model, "prediction_step")
        with ask_models(of_loss if prediction_loss_only else WantedOutputs.WHOLE):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _smooth_over_ranks(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None
    ) -> dict[str, Any]:
        """Return inputs with which a causal language model smooths labels, without whole logits."""
        if not self._is_smoothed(model) or inputs.get("labels") is None:
            return inputs
        epsilon = self.label_smoother.epsilon
        self.label_smoother = _SmoothedByModel(epsilon)
        more = {"shift_labels": shift_labels(inputs["labels"]), "label_smoothing": epsilon}
        if num_items_in_batch is not None:
            more["num_items_in_batch"] = num_items_in_batch
        return {**more, **inputs}

    def _is_smoothed(self, model: nn.Module) -> bool:
        """Whether the model can smooth the labels itself, and must."""
        if self.label_smoother is None or self.compute_loss_func is not None:
            return False
        return isinstance(find_enabled(model, inside=False), EnabledCausalLM)

    def _choose_outputs(self, model: nn.Module, *methods: str) -> WantedOutputs | None:
        """Return what a step reads of the model, or None for what calls return by default.

        Transformers' Trainer reads the loss alone. Code of others than tested trainers may read
        anything: the methods of a training step, `methods`, and modules around the model.
        """
        if self.sp.size == 1:
            return None
        owner = self._find_owner("compute_loss", "_compute_loss", "training_step", *methods)
        of_transformers = owner.__module__.startswith("transformers.")
        if not (of_transformers or is_tested(owner) or self._sp_options.loss_only):
            return WantedOutputs.WHOLE_FOR_OTHERS
        enabled = find_enabled(model)
        if enabled is not None and enabled._with_targets is not None:
            return enabled._with_targets
        reads_loss = of_transformers and self.compute_loss_func is None
        return WantedOutputs.LOSS_ONLY if reads_loss or self._is_smoothed(model) else None

    def _find_owner(self, *methods: str) -> type:
        """Return the class that defines one of these methods: `cls` or the first base with one."""
        after = type(self).__mro__[type(self).__mro__.index(ParallelTrainer) + 1 :]
        return next(base for base in after if not vars(base).keys().isdisjoint(methods))

    def _run_epoch(self, *args: Any, **named: Any) -> Any:
        """Run an epoch in which skipping batches keeps what the accelerator has set in a loader."""
        skip = self.accelerator.skip_first_batches
        with replaced(transformers.trainer, skip_first_batches=skip):
            return super()._run_epoch(*args, **named)

    def _save_checkpoint(self, *args: Any, **named: Any) -> Any:
        with self.accelerator._count_ranks():
            return super()._save_checkpoint(*args, **named)

    def _load_from_checkpoint(self, *args: Any, **named: Any) -> Any:
        with self.accelerator._count_ranks():
            return super()._load_from_checkpoint(*args, **named)

    def _load_best_model(self) -> Any:
        with self.accelerator._count_ranks():
            return super()._load_best_model()

    def _load_optimizer_and_scheduler(self, *args: Any, **named: Any) -> Any:
        with self.accelerator._count_ranks():
            return super()._load_optimizer_and_scheduler(*args, **named)


class _SmoothedByModel(LabelSmoother):
    """The loss that the model has computed with label smoothing."""

    def __call__(self, model_output: Any, *_args: Any, **_named: Any) -> Tensor:
        return model_output["loss"]


def _check_arguments(args: Any, model: Any) -> None:
    """Raise ValueError for arguments of a Trainer that do not work over ranks."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected a process for each GPU, got one with {args.n_gpu} GPUs and so DataParallel: "
            "start the script with torchrun or accelerate launch"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "expected neftune_noise_alpha=None: its noise is scaled by the tokens of a rank, not "
            "of the sequence"
        )
    for name in ("predict_with_generate", "generate_during_eval"):
        if getattr(args, name, False):
            raise ValueError(
                f"expected {name}=False, got True: over ranks there are no caches for it, "
                "so generate in `with plain(model):`, as docs/trainers.md shows"
            )
    kernels = args.liger_kernel_config or {}
    if args.use_liger_kernel and kernels.get("fused_linear_cross_entropy", True):
        raise ValueError(
            "expected use_liger_kernel=False, since Liger's fused loss replaces the model's "
            'forward: leave it out, or pass liger_kernel_config={"fused_linear_cross_entropy": '
            "False}"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives each rank other rows, and a group's "
            "ranks need the same: choose 'random' or 'group_by_length'"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "expected a model that was loaded whole, got one that from_pretrained sharded: leave "
            "distributed_config out, and shard with fsdp"
        )
