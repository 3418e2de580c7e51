"""The functions of a ring alone. Unlike yunchang's they take no softcap and attn_type."""

from ..ring_flash_attn import *  # noqa: F403
