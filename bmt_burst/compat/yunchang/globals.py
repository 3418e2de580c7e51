"""The groups of ranks."""

from . import PROCESS_GROUP, set_seq_parallel_pg  # noqa: F401
