"""An Accelerator in which groups of ranks share each sequence."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import DistributedType
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ....ranks.groups import init_sequence_parallel
from ....ranks.sequence_parallel import SequenceParallel
from .loaders import GroupStream, keep_order, seed_workers_by_group, share_stream
from .models import enable_inside
from .options import Switch
from .peers import Peers, find_peers

ALL_RANKS = Peers(0, 0)
_REFUSED_TYPES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class ParallelAccelerator(Accelerator):
    """The methods of an Accelerator that count a group of ranks as one process.

    sp  the ranks that share this rank's sequences
    """

    _switch: Switch
    sp: SequenceParallel
    _peers: Peers = ALL_RANKS  # until there are groups
    _counts_ranks = False  # within what saves and loads: each rank then has files of its own

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.start()

    def start(self) -> None:
        """Make the groups, once accelerate has initialised torch.distributed."""
        self._check()
        self._evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        switch = self._switch
        if dist.is_initialized():
            self.sp = init_sequence_parallel(switch.sp_size, layout=switch.layout, mesh=switch.mesh)
        elif switch.sp_size in (None, 1) and switch.mesh is None:
            self.sp = SequenceParallel(layout=switch.layout)
        else:
            raise ValueError(
                f"sp_size={switch.sp_size} needs as many processes or more, got one: start the "
                "script with torchrun or accelerate launch"
            )
        self._peers = find_peers(self.sp)

    def _check(self) -> None:
        """Raise ValueError for settings that do not work over ranks."""
        if self.distributed_type in _REFUSED_TYPES:
            raise ValueError(
                f"expected DDP or FSDP, got {self.distributed_type.value}, which sequence "
                "parallelism was not made for: leave it out"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and self.distributed_type == DistributedType.NO:
            raise ValueError(
                f"accelerate sees one process, but there are {ranks}, so gradients would not be "
                "averaged: on CPUs pass use_cpu=True to TrainingArguments or cpu=True to the "
                "Accelerator, else start the script with torchrun or accelerate launch"
            )
        config = self.parallelism_config
        for name in ("tp_size", "cp_size", "sp_size"):
            if config is not None and (getattr(config, name) or 1) > 1:
                raise ValueError(
                    f"expected {name}=1 in the ParallelismConfig, got {getattr(config, name)}: "
                    "sequence_parallel shares sequences, so leave it out"
                )
        if self.dataloader_config.dispatch_batches:
            raise ValueError(
                "expected dispatch_batches=False or None, got True: each group reads its own "
                "batches, also from a stream"
            )

    @property
    def num_processes(self) -> int:
        """The number of groups."""
        if self._peers is ALL_RANKS or self._counts_ranks:
            return self.state.num_processes
        return self._peers.count

    @property
    def process_index(self) -> int:
        """The number of this rank's group."""
        if self._peers is ALL_RANKS or self._counts_ranks:
            return self.state.process_index
        return self._peers.index

    @contextmanager
    def count_ranks(self) -> Iterator[None]:
        """Count each rank as a process, as what saves and loads files must."""
        before, self._counts_ranks = self._counts_ranks, True
        try:
            yield
        finally:
            self._counts_ranks = before

    def save_state(self, *args: Any, **named: Any) -> Any:
        with self.count_ranks():
            return super().save_state(*args, **named)

    def load_state(self, *args: Any, **named: Any) -> Any:
        with self.count_ranks():
            return super().load_state(*args, **named)

    def enable(self, model: nn.Module) -> None:
        """Enable the language model in `model`, unless it is enabled."""
        if self.sp.size > 1:
            enable_inside(model, self.sp, self._switch)

    def prepare(self, *args: Any, **named: Any) -> Any:
        for x in args:
            if isinstance(x, nn.Module):
                self.enable(x)
        return super().prepare(*args, **named)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        self.enable(model)
        if self.sp.size > 1 and not evaluation_mode and model in self._evaluated:
            self._forget(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode:
            self._evaluated.add(model)
        return prepared

    def _forget(self, model: nn.Module) -> None:
        """Undo that a model was prepared for evaluation, so that it can be prepared for training.

        accelerate returns a model that it prepared before as it is, without DDP. Gradients would
        then silently not be averaged.
        """
        self._evaluated.remove(model)
        self._models[:] = [x for x in self._models if x is not model]
        del model._is_accelerate_prepared
        if (forward := vars(model).pop("_original_forward", None)) is not None:
            model.forward = forward

    @property
    def dispatch_batches(self) -> bool | None:
        """False if ranks share sequences: rank 0 would share out batches by ranks."""
        return self.dataloader_config.dispatch_batches if self.sp.size == 1 else False

    def _prepare_device_mesh(self) -> Any:
        """Return None if ranks share sequences: accelerate would share out data by the sizes of the
        mesh, which count ranks.
        """
        return super()._prepare_device_mesh() if self.sp.size == 1 else None

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **named: Any) -> Any:
        """Return a loader of this group's batches, the same on all of its ranks."""
        if self.sp.size == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **named)
        peers = self._peers
        seed_workers_by_group(data_loader, self.state.process_index, peers.index)
        is_stream = isinstance(data_loader.dataset, IterableDataset)
        if is_stream and peers.count > 1:
            data_loader = share_stream(data_loader, peers.index, peers.count, self.split_batches)
            self._peers = Peers(0, 1)  # it is shared out already
        try:
            loader = super().prepare_data_loader(data_loader, *args, **named)
        finally:
            self._peers = peers
        if (is_stream or peers.count == 1) and isinstance(loader, DataLoaderShard):
            keep_order(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if self.sp.size > 1:
            prepared.__class__ = GroupScheduler
            prepared.count_groups(self._peers.count)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Gather the tensors of all groups, as accelerate gathers those of all processes."""
        if self.sp.size == 1:
            return super().gather(tensor)
        return recursively_apply(self._peers.gather, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the tensors of all groups, as accelerate reduces those of all processes."""
        if self.sp.size == 1:
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(
            self._peers.reduce, tensor, error_on_other_type=True, reduction=reduction
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the data of all groups, without what the last batch repeats."""
        if self.sp.size == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        use_gather_object = use_gather_object or not _are_tensors(input_data)
        if use_gather_object:
            data = self._peers.gather_objects(input_data)
        else:
            data = self.gather(input_data)
        rows = self._find_remainder()
        if rows <= 0:
            return data
        if use_gather_object:
            return data[:rows]
        return recursively_apply(lambda x: x[:rows] if x.dim() else x, data)

    def _find_remainder(self) -> int:
        """Return the rows of the last batch of all groups if it is incomplete and was reached."""
        state = self.gradient_state
        if not state.end_of_dataloader:
            return 0
        dataset = getattr(state.active_dataloader, "dataset", None)
        return dataset.remainder if isinstance(dataset, GroupStream) else state.remainder

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this group's part of the inputs."""
        mine = SimpleNamespace(
            num_processes=self.num_processes, process_index=self.process_index, device=self.device
        )
        with PartialState.split_between_processes(mine, inputs, apply_padding) as part:
            yield part


class GroupScheduler(AcceleratedScheduler):
    """A scheduler that takes a step for each group of ranks, as accelerate takes one for each
    process, since each reads a batch.
    """

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
