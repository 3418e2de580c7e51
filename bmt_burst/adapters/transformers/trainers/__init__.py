"""Trainers and accelerate loops in which groups of ranks share each sequence.

switch.py       `sequence_parallel`, and the classes that it refuses
options.py      its options
trainer.py      what a Trainer does otherwise: losses, evaluation, counts, saves
accelerator.py  what an Accelerator does otherwise: data, gathers, schedulers, models
loaders.py      streams and orders of data for groups
peers.py        the groups in the world, and exchanges between them
models.py       the language model inside of wrappers
"""
