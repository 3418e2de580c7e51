"""TRL's GRPOTrainer and RLOOTrainer, in which groups of ranks share each sequence.

A group counts as one process: its ranks have the same completions, rewards and advantages. Each of
them generates a share of the completions, and the first one computes the rewards.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import set_seed
from trl.generation import vllm_generation

from ...enabling import replaced
from .models import plain
from .options import GENERATING_OF_TRL, find_base_of_trl
from .peers import gather_in_group
from .trainer import ParallelTrainer


class GeneratingTrainer(ParallelTrainer):
    """The methods of TRL's trainers that generate. They count a group of ranks as one process."""

    # attributes of TRL's trainers
    args: Any
    use_vllm: bool
    num_generations: int
    num_generations_eval: int
    reward_funcs: list[Any]
    reward_func_names: list[str]
    async_loop: Any
    _is_vlm: bool
    _pending_extra_logs: dict[str, list]
    _pending_metrics: dict[str, list]

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        if self.sp.size == 1:
            return
        set_seed(self.args.seed + self.accelerator.process_index)  # TRL adds the rank
        functions = zip(self.reward_func_names, self.reward_funcs, strict=True)
        self.reward_funcs = [
            x if isinstance(x, nn.Module) else self._reward_once(name, x) for name, x in functions
        ]
        if (function := getattr(self, "rollout_func", None)) is not None:
            # Each rank calls it, since it may call a vLLM server together with the others.
            self.rollout_func = lambda *given: self._share("rollout_func", lambda: function(*given))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.sp.size == 1:
            return
        args, groups = self.args, self.accelerator.num_processes
        rows = args.per_device_train_batch_size * groups * args.steps_per_generation
        args.generation_batch_size = rows  # TRL has counted ranks
        self._check_rows("train", rows, self.num_generations)
        if args.eval_strategy != "no":
            rows = args.per_device_eval_batch_size * groups
            self._check_rows("eval", rows, self.num_generations_eval)

    def _check_rows(self, mode: str, rows: int, generations: int) -> None:
        """Raise ValueError if a batch does not have all completions of its prompts."""
        if rows % generations:
            size = getattr(self.args, f"per_device_{mode}_batch_size")
            steps = f" and steps_per_generation={self.args.steps_per_generation}"
            raise ValueError(
                f"expected batches with all {generations} completions of each prompt, got {rows} "
                f"rows: a group of {self.sp.size} ranks counts as one process, and has "
                f"per_device_{mode}_batch_size={size}{steps * (mode == 'train')}"
            )

    def _describe_arguments(self) -> dict[str, str]:
        self._check_generation()
        return super()._describe_arguments()

    def _check_generation(self) -> None:
        """Raise ValueError for ways to generate that do not work over ranks."""
        if self.use_vllm and self.args.vllm_mode == "colocate":
            raise ValueError(
                "expected vllm_mode='server', got 'colocate', in which each rank would generate "
                "all rows of its group"
            )
        if self.args.use_transformers_continuous_batching:
            raise ValueError(
                "expected use_transformers_continuous_batching=False, got True: leave it out, "
                "since each rank generates only a share of its group's rows"
            )
        for name in ("tools", "environment_factories"):
            if getattr(self, name, None):
                option = name.replace("factories", "factory")
                raise ValueError(
                    f"{option} would be called on every rank of a group: leave it out, and call "
                    "tools and environments in a rollout_func"
                )
        if self._is_vlm:
            raise ValueError(
                "expected a tokenizer, got a processor: images cannot be cut over ranks, so train "
                "a model that takes text alone"
            )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the rows of a step: generate completions, or take those from before."""
        self._enable_reference()
        of_trl = find_base_of_trl(type(self), GENERATING_OF_TRL)
        assert of_trl is not None, "sequence_parallel chose this class by it"
        module: Any = sys.modules[of_trl.__module__]
        peers = self.accelerator._peers
        # TRL imports functions of accelerate, which count ranks
        gather_object = module.gather_object if peers is None else peers.gather_objects
        shuffle = functools.partial(self._shuffle, module.shuffle_sequence_dict)
        with (
            replaced(module, gather=self.accelerator.gather, gather_object=gather_object),
            replaced(module, shuffle_sequence_dict=shuffle),
            replaced(vllm_generation, gather_object=gather_object),
        ):
            return super()._prepare_inputs(inputs)

    def _shuffle(self, shuffle: Callable, batch: dict[str, Any]) -> dict[str, Any]:
        """Shuffle the rows of a batch as the first rank of the group does. Keep those of a prompt
        together if they are folded.
        """
        if self.sp.size > 1:
            torch.set_rng_state(self._share("the order of rows", torch.get_rng_state))
        if not self._sp_options.fold:
            return shuffle(batch)
        prompts = batch["prompt_ids"].cpu()
        starts = (prompts[1:] != prompts[:-1]).any(1).nonzero().flatten() + 1
        rows = [*torch.arange(len(prompts)).tensor_split(starts)]
        order = torch.cat(shuffle({"rows": rows})["rows"])
        return {name: x[order] if x.dim() else x for name, x in batch.items()}

    def _share(self, doing: str, find: Callable[[], Any]) -> Any:
        """Return what `find` returns on the first rank of this group. Its ranks all call it."""

        def find_mine() -> Any:
            found = find()
            return None if self.sp.rank else found

        return gather_in_group(self.sp, doing, find_mine, self.accelerator.device)[0]

    def _reward_once(self, name: str, function: Callable) -> Callable:
        """Return a reward function that runs on the first rank of a group, for all of its ranks.
        What it logs is sent along. Asynchronous functions run one after the other.
        """

        def compute(given: dict[str, Any]) -> tuple[list[float | None], dict, dict] | None:
            if self.sp.rank > 0:
                return None
            rewards = function(**given)
            if inspect.iscoroutine(rewards):
                rewards = asyncio.run_coroutine_threadsafe(rewards, self.async_loop).result()
            rewards = [None if x is None else float(x) for x in rewards]
            return rewards, dict(self._pending_extra_logs), dict(self._pending_metrics)

        def reward(**given: Any) -> list[float | None]:
            rewards, extra, metrics = self._share(f"the reward {name}", lambda: compute(given))
            self._pending_extra_logs.update(extra)
            self._pending_metrics.update(metrics)
            return rewards

        return reward

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **named: Any) -> Any:
        """Generate the completions of a group's rows. Each rank generates a share of them."""
        generate = super()._generate_single_turn
        if self.use_vllm:
            return generate(prompt_ids, *args, **named)
        if self.sp.size == 1:
            with plain(self.model):
                return generate(prompt_ids, *args, **named)
        begin, end = (len(prompt_ids) * (self.sp.rank + i) // self.sp.size for i in (0, 1))
        # FSDP2 gathers weights in each step, so a rank without rows generates one that nobody reads
        mine = prompt_ids[begin:end] or prompt_ids[:1]

        def generate_mine() -> tuple[Any, ...]:
            found = generate(mine, *args, **named)
            completions, *others = found if isinstance(found, tuple) else (found,)
            return completions[: end - begin], *others

        with self._own_random_numbers(), plain(self.model):
            doing, device = "a generation", self.accelerator.device
            shares = gather_in_group(self.sp, doing, generate_mine, device)
        completions = [row for rows, *_ in shares for row in rows]
        _, *others = shares[0]  # GRPOTrainer's log-probabilities, which vLLM alone returns
        return (completions, *others) if others else completions

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw other random numbers than the other ranks, then go on with those of the group."""
        seed = self._share("the start of a generation", lambda: int(torch.randint(2**62, ())))
        device = self.accelerator.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(seed + self.sp.rank)
            yield
