"""The functions of a ring alone, by ring_impl_type."""

from .. import RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT  # noqa: F401
