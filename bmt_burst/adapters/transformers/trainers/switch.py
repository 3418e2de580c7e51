"""One line that makes a Trainer, a TRL trainer or an Accelerator sequence parallel."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from ....base.arguments import as_bool
from ...enabling import Class, make_class
from .options import (
    FOLDING_OF_TRL,
    GENERATING_OF_TRL,
    TESTED_OF_TRL,
    Options,
    find_base_of_trl,
    is_tested,
)

_GENERATING = (
    *("DistillationTrainer", "A2POTrainer", "AsyncGRPOTrainer", "AsyncDistillationTrainer"),
    *("GKDTrainer", "GOLDTrainer", "IWOPDTrainer", "OnlineDPOTrainer", "SDFTTrainer"),
    *("SDPOTrainer", *GENERATING_OF_TRL),
)


def sequence_parallel(
    cls: Class,
    *,
    sp_size: int | None = None,
    mesh: dist.DeviceMesh | None = None,
    layout: str = "zigzag",
    balanced: bool = False,
    flash: str = "auto",
    deterministic: bool = False,
    strategy: str = "auto",
    untested: bool = False,
    loss_only: bool = False,
    fold: bool = False,
) -> Class:
    """Return a subclass of `cls` in which groups of ranks share each sequence.

        trainer = sequence_parallel(SFTTrainer, sp_size=8)(model=path, args=..., train_dataset=data)
        accelerator = sequence_parallel(Accelerator, sp_size=8)(mixed_precision="bf16")

    The ranks of a group count as one process: they read the same batches, and losses, metrics,
    counts and learning rates are those of one process for each group. Saved models are plain. With
    one rank a group, the class does what `cls` does.

    cls               transformers' Trainer or Seq2SeqTrainer, TRL's trainer for SFT, DPO, GRPO,
                      RLOO, rewards, KTO, ORPO, CPO or TPO, accelerate's Accelerator, or a subclass
    sp_size, mesh,    the ranks that share a sequence, as in init_sequence_parallel. An object makes
    layout            its groups once accelerate has initialised torch.distributed, and has them as
                      `sp`
    balanced, flash, deterministic, strategy
                      as in `enable`, with which models are enabled before they are wrapped
    untested          True to accept models outside the list, as in `enable`, and trainers that
                      were not tested, with a warning
    loss_only         whether code of yours reads only the loss of calls with labels: a subclass's
                      `compute_loss` or steps, or a module around the model. Then no whole logits
                      are made
    fold              whether GRPOTrainer, RLOOTrainer and DPOTrainer compute tokens that rows of a
                      batch share once for all of them, such as a prompt. Also with one rank a group

    Raises TypeError for classes that are neither, and ValueError for other trainers that generate,
    and for those that were not tested unless untested=True. Objects raise ValueError, on all ranks
    and before a step, for arguments that do not work over ranks: docs/trainers.md lists them.
    """
    if not isinstance(cls, type):
        raise TypeError(f"expected a class, such as Trainer, got a {type(cls).__name__}")
    if sp_size is not None and mesh is not None:
        raise ValueError("expected sp_size or mesh, got both: a mesh has a size")
    options = Options(
        sp_size,
        mesh,
        layout,
        balanced=as_bool("balanced", balanced),
        untested=as_bool("untested", untested),
        loss_only=as_bool("loss_only", loss_only),
        fold=as_bool("fold", fold),
        of_attention={
            "flash": flash,
            "deterministic": as_bool("deterministic", deterministic),
            "strategy": strategy,
        },
    )
    names = [base.__name__ for base in cls.__mro__]
    _check_class(cls, names, options.untested)
    if options.fold and not find_base_of_trl(cls, FOLDING_OF_TRL):
        raise ValueError(f"fold=True is for TRL's {', '.join(FOLDING_OF_TRL)}, got {cls.__name__}")
    if find_base_of_trl(cls, GENERATING_OF_TRL):
        from .generating import GeneratingTrainer as mixin
    elif "Trainer" in names:
        from .trainer import ParallelTrainer as mixin
    else:
        from .accelerator import ParallelAccelerator as mixin
    return make_class(mixin, cls, _sp_options=options)


def _check_class(cls: type, names: list[str], untested: bool) -> None:
    """Raise TypeError or ValueError for a class that cannot be sequence parallel."""
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    name = cls.__name__
    if hasattr(cls, "_sp_options"):
        raise ValueError(f"this {name} is already sequence parallel")
    of_trainer = "Trainer" in names and "transformers" in packages
    if not of_trainer and not ("Accelerator" in names and "accelerate" in packages):
        raise TypeError(
            "expected transformers' Trainer, one of TRL's trainers, accelerate's Accelerator, or a "
            f"subclass, got {name}"
        )
    of_trl = [base for base in cls.__mro__ if base.__module__.startswith("trl.")]
    # the first decides: some are subclasses of a tested one, and compute other losses
    if not of_trl or is_tested(of_trl[0]):
        return
    if find_base_of_trl(cls, _GENERATING):
        raise ValueError(
            f"{of_trl[0].__name__} generates while it trains, and gathers completions from ranks, "
            "not from groups: expected GRPOTrainer or RLOOTrainer, or a subclass of yours"
        )
    text = f"{of_trl[0].__name__} of {of_trl[0].__module__} was not tested over ranks"
    if not untested:
        raise ValueError(
            f"{text}: expected TRL's {', '.join(TESTED_OF_TRL)}, or a subclass of one. "
            "untested=True accepts it: first compare its losses with those of one rank, as "
            "docs/trainers.md shows"
        )
    warnings.warn(
        f"{text}: compare its losses and gradient norms with those of sp_size=1, as "
        "docs/trainers.md shows",
        stacklevel=3,
    )
