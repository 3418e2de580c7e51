"""Trainers and accelerate loops in which groups of ranks share each sequence.

switch.py       `sequence_parallel`, and the classes that it refuses
options.py      its options, and the trainers of TRL that were tested
trainer.py      how it differs from a plain Trainer: losses, evaluation, counts, saves
accelerator.py  how it differs from a plain Accelerator: data, gathers, schedulers, models
peers.py        the groups in the world, and exchanges between them
models.py       the language models inside of wrappers
"""
