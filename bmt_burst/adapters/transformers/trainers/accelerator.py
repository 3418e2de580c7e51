"""An Accelerator in which groups of ranks share each sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import DistributedType
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from ....base.compiled import not_compiled
from ....ranks.agreement import run_together
from ....ranks.groups import init_sequence_parallel
from ....ranks.sequence_parallel import SequenceParallel
from .models import enable_inside, find_enabled
from .options import Options
from .peers import Peers, find_peers

_REFUSED_TYPES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class ParallelAccelerator(Accelerator):
    """The methods of an Accelerator that count a group of ranks as one process."""

    _sp_options: Options
    sp: SequenceParallel  # the ranks that share this rank's sequences
    _peers: Peers | None = None  # None if each rank counts
    _counts_ranks = False  # within what saves and loads: each rank then has files of its own
    _unsynced: list[nn.Module]  # models within no_sync
    _not_averaged: WeakSet[nn.Module]  # models that were within no_sync in their last forward

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._make_groups()

    def _make_groups(self, sp: SequenceParallel | None = None) -> None:
        """Make the groups over an initialised torch.distributed, or take those of `sp`."""
        options = self._sp_options
        self._unsynced, self._not_averaged = [], WeakSet()
        if sp is not None:
            self.sp = sp
        elif dist.is_initialized():
            self.sp = init_sequence_parallel(
                options.sp_size, layout=options.layout, mesh=options.mesh
            )
        elif options.sp_size in (None, 1) and options.mesh is None:
            self.sp = SequenceParallel(layout=options.layout)
        else:
            raise ValueError(
                f"sp_size={options.sp_size} needs as many processes or more, got one: start the "
                "script with torchrun or accelerate launch"
            )
        if self.sp.size > 1:
            self._check_settings()
            self._peers = find_peers(self.sp)

    def _check_settings(self) -> None:
        """Raise ValueError for settings that do not work over ranks."""
        kind = self.distributed_type
        if kind in _REFUSED_TYPES:
            raise ValueError(
                f"expected DDP or FSDP2, got {kind.value}, which is not supported with sequence "
                "parallelism: leave it out"
            )
        if kind == DistributedType.NO:
            raise ValueError(
                "accelerate sees one process, but there are several, so gradients would not be "
                "averaged: on CPUs pass use_cpu=True to TrainingArguments or cpu=True to the "
                "Accelerator, else start the script with torchrun or accelerate launch"
            )
        if kind == DistributedType.FSDP and not self.is_fsdp2:
            raise ValueError("expected FSDP2, got FSDP1: set fsdp_version=2 in the plugin")
        for name in ("tp_size", "cp_size", "sp_size"):
            size = getattr(self.parallelism_config, name, None)
            if size is not None and size > 1:
                raise ValueError(
                    f"expected {name}=1 in the ParallelismConfig, got {size}: sequence_parallel "
                    "shares sequences, so leave it out"
                )
        if self.dataloader_config.dispatch_batches:
            raise ValueError(
                "expected dispatch_batches=False or None, got True: leave it out. Streams are then "
                "shared out to groups, and other data are read by each of them"
            )

    @property
    def num_processes(self) -> int:
        """The number of groups."""
        if self._peers is None or self._counts_ranks:
            return self.state.num_processes
        return self._peers.count

    @property
    def process_index(self) -> int:
        """The number of this rank's group."""
        if self._peers is None or self._counts_ranks:
            return self.state.process_index
        return self._peers.index

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank: code for it may write files."""
        return self.state.is_last_process

    @contextmanager
    def _count_ranks(self) -> Iterator[None]:
        """Count each rank as a process, as what saves and loads files must."""
        before, self._counts_ranks = self._counts_ranks, True
        try:
            yield
        finally:
            self._counts_ranks = before

    def save_state(self, *args: Any, **named: Any) -> Any:
        with self._count_ranks():
            return super().save_state(*args, **named)

    def load_state(self, *args: Any, **named: Any) -> Any:
        with self._count_ranks():
            return super().load_state(*args, **named)

    def check_trigger(self) -> bool:
        with self._count_ranks():  # any rank may have set it
            return super().check_trigger()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._unsynced.append(model)
        try:
            with super().no_sync(model):
                yield
        finally:
            self._unsynced.remove(model)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        with super().trigger_sync_in_backward(model):
            self._not_averaged.discard(model)  # this backward averages all that was accumulated
            yield

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if self._peers is not None and not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer.register_step_pre_hook(self._check_averaged)
        return super().prepare_optimizer(optimizer, device_placement)

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        """Raise ValueError before a step with gradients that were not averaged over ranks."""
        models = {*self._unsynced, *self._not_averaged}
        local = {id(p) for model in models for p in model.parameters()}
        if any(id(p) in local for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "an optimizer takes a step after a call within no_sync, and with sequence "
                "parallelism each rank of a group has only its part of the gradients: run the last "
                "forward and backward before a step outside of no_sync, or use "
                "accelerator.accumulate, and leave LocalSGD out"
            )

    def _enable(self, model: nn.Module) -> None:
        """Enable the models of transformers in `model`, unless they are enabled."""
        if self.sp.size > 1 or self._sp_options.fold:
            enable_inside(model, self.sp, self._sp_options)

    def prepare(self, *args: Any, **named: Any) -> Any:
        for x in args:
            if isinstance(x, nn.Module):
                self._enable(x)
        prepared = super().prepare(*args, **named)
        for x in prepared if isinstance(prepared, tuple | list) else (prepared,):
            if isinstance(x, FSDPModule):
                self._hook_calls(x)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        self._enable(model)
        is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel | FSDPModule)
        if self.sp.size > 1 and not evaluation_mode and not is_wrapped:
            self._forget(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if prepared is not model:
            self._hook_calls(prepared)
        return prepared

    def _meet(self, doing: str) -> None:
        """Let the ranks that share sequences agree on this step, or raise on all of them."""
        if self.sp.size > 1:
            run_together(self.sp.rings, doing, lambda: None)

    def _hook_calls(self, wrapper: Any) -> None:
        """Let ranks that share sequences agree before each forward of DDP or FSDP2, in which a rank
        that calls alone would wait. Note whether gradients will be averaged: DDP decides it there.
        """
        enabled = find_enabled(wrapper)
        if self.sp.size == 1 or enabled is None:
            return
        if (before := getattr(wrapper, "_hook_of_calls", None)) is not None:  # of another object
            before.remove()
        doing = f"a call of the prepared {type(enabled).__name__}"

        @not_compiled
        def begin_call(wrapper: Any, *_arguments: Any) -> None:
            self._meet(doing)
            if torch.is_grad_enabled():
                averages = getattr(wrapper, "require_backward_grad_sync", True)  # DDP's own flag
                if averages and wrapper not in self._unsynced:
                    self._not_averaged.discard(wrapper)
                else:
                    self._not_averaged.add(wrapper)

        wrapper._hook_of_calls = wrapper.register_forward_pre_hook(begin_call, prepend=True)

    def _forget(self, model: nn.Module) -> None:
        """Undo that a model was prepared for evaluation. accelerate would return it without DDP,
        and gradients would silently not be averaged.
        """
        if not vars(model).pop("_is_accelerate_prepared", False):
            return
        self._models[:] = [x for x in self._models if x is not model]
        if (forward := vars(model).pop("_original_forward", None)) is not None:
            model.forward = forward

    def _prepare_device_mesh(self) -> Any:
        """Return no mesh for shared sequences: accelerate would share out data by its sizes."""
        return super()._prepare_device_mesh() if self._peers is None else None

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **named: Any) -> Any:
        """Return a loader of this group's batches, the same on all of its ranks."""
        peers = self._peers
        if peers is None or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **named)
        _seed_workers_by_group(data_loader, self.state.process_index, peers.index)
        loader = super().prepare_data_loader(data_loader, *args, **named)
        self._count_groups(loader)
        if peers.count == 1 and isinstance(loader, DataLoaderShard):
            _keep_order(loader)
        return loader

    def _count_groups(self, loader: Any) -> None:
        """Let a loader of a stream share out batches by groups. The ranks of the first group read.
        All ranks receive the batch of rank 0, and take their group's part.
        """
        if self._peers is not None and isinstance(loader, DataLoaderDispatcher):
            loader.state = self  # of a PartialState it reads the numbers and the device

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        loader = super().skip_first_batches(dataloader, num_batches)
        self._count_groups(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if self._peers is not None and not isinstance(prepared, GroupScheduler):
            prepared.__class__ = GroupScheduler
            prepared.count_groups(self._peers.count)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Gather the tensors of all groups, as accelerate gathers those of all processes."""
        if self._peers is None or self._counts_ranks:
            return super().gather(tensor)
        if self._peers.count == 1:
            return tensor
        return recursively_apply(self._peers.gather, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the tensors of all groups, as accelerate reduces those of all processes."""
        if self._peers is None or self._counts_ranks:
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(
            self._peers.reduce, tensor, error_on_other_type=True, reduction=reduction
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the data of all groups, without what the last batch repeats."""
        if self._peers is None or (_are_tensors(input_data) and not use_gather_object):
            return super().gather_for_metrics(input_data, use_gather_object)  # calls `gather`
        data, state = self._peers.gather_objects(input_data), self.gradient_state
        return data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else data

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return a context with this group's part of the inputs."""
        # of a PartialState it reads the numbers, which count groups here, and the device
        return PartialState.split_between_processes(self, inputs, apply_padding)


class GroupScheduler(AcceleratedScheduler):
    """A scheduler that takes a step for each group of ranks, since each group reads a batch."""

    split_batches: bool
    _steps: int
    _ends: bool

    def count_groups(self, groups: int) -> None:
        # With split_batches, the class below takes one step a call.
        self._steps = 1 if self.split_batches else groups
        self._ends = not self.split_batches and hasattr(self.scheduler, "total_steps")
        self.split_batches = True

    def step(self, *args: Any, **named: Any) -> None:
        is_step = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self._steps if is_step else 1):
            if is_step and self._ends and self.scheduler._step_count > self.scheduler.total_steps:
                return  # as accelerate ends OneCycleLR
            super().step(*args, **named)


def _are_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _seed_workers_by_group(loader: DataLoader, rank: int, index: int) -> None:
    """Let the workers of all ranks in a group draw the same numbers, by the rank that
    transformers' seed_worker takes.
    """
    function: Any = loader.worker_init_fn
    if isinstance(function, functools.partial) and function.keywords.get("rank") == rank:
        loader.worker_init_fn = functools.partial(function, rank=index)


def _keep_order(loader: DataLoaderShard) -> None:
    """Let all ranks draw one order, since accelerate synchronises no generator without shards."""
    for owner in (loader.get_sampler(), loader.dataset):
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
            loader.synchronized_generator = generator
            loader.rng_types = [*(loader.rng_types or ()), "generator"]
    loader.rng_types = [*(loader.rng_types or ()), "torch"]
