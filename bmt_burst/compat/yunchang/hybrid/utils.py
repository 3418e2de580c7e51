"""The functions of a ring alone, by ring_impl_type."""

from .. import ring

RING_IMPL_DICT = {
    "basic": ring.ring_flash_attn_func,
    "zigzag": ring.zigzag_ring_flash_attn_func,
    "strip": ring.stripe_flash_attn_func,
}

RING_IMPL_QKVPACKED_DICT = {
    "basic": ring.ring_flash_attn_qkvpacked_func,
    "zigzag": ring.zigzag_ring_flash_attn_qkvpacked_func,
    "strip": ring.stripe_flash_attn_qkvpacked_func,
}
