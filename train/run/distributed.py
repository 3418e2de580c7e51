"""Starting a rank: its device, and the package that carries messages between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bmt_burst import kernels
from train.base import ranks
from train.base.signals import has_launcher
from train.base.wording import counted
from train.engine.fp8 import check_device
from train.run.replacement import open_store
from train.settings.config import TrainConfig
from train.settings.settings import shared_options


def init_distributed(config: TrainConfig, shared: Mapping[str, Any] | None = None) -> torch.device:
    """Join the ranks of the environment, or run alone. Return the device, or raise ValueError.

    Raises RankError on every rank if ranks differ in their `shared` options, by default those of
    `config`, in the engine or in the type of the device.
    """
    if config.restarts and "RANK" in os.environ and not has_launcher():
        raise ValueError("--restarts is for --processes; under torchrun give it --max-restarts")
    device = choose_device(config.device)
    engine = choose_engine(config, device)
    open_store()
    # Beside BMTrain, torch.distributed only carries messages between hosts.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and engine == "torch" else "gloo"
    if "RANK" in os.environ:
        _join(backend, timedelta(seconds=rank_timeout(config)))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    shared = shared_options(config.to_dict()) if shared is None else shared
    ranks.check_same({**shared, "--engine": engine, "--device": device.type})
    if engine == "bmtrain":
        # lets NCCL run several communicators at once
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        if "RANK" not in os.environ:  # two runs on one machine must not share BMTrain's port
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        import bmtrain

        bmtrain.init_distributed(seed=config.seed)
    return device


def _join(backend: str, timeout: timedelta) -> None:
    """Join the other ranks. Raises ValueError if rank 0 cannot listen at the port of all."""
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} of this machine is in use by another "
            "program: give all ranks another MASTER_PORT, or let that program end first"
        ) from error


def choose_engine(config: TrainConfig, device: torch.device) -> str:
    """Return "bmtrain" or "torch". Raises ValueError if it is not available or does not fit."""
    available = device.type == "cuda" and kernels.installed("bmtrain")
    engine = config.pick_engine(available)
    if config.fp8:
        check_device(device)
    if engine == "bmtrain" and not available:
        raise ValueError(
            "--engine bmtrain needs GPUs and the package bmtrain: see train/install_gpu.sh"
        )
    return engine


def rank_timeout(config: TrainConfig) -> float:
    """Return the seconds that ranks wait for each other. The watchdog notices a hang earlier."""
    return config.timeout + 120


def choose_device(wanted: str) -> torch.device:
    """Return this process's device. Raises ValueError if --device cuda has too few GPUs."""
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if wanted == "cuda" and gpus < here:
        processes = counted(here, "process", "processes")
        raise ValueError(
            f"--device cuda needs a GPU for each of {processes}, this machine has {gpus}"
        )
    if wanted == "cpu" or gpus < here:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device
