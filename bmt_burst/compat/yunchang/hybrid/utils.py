"""The functions of a ring alone, by the ring_impl_type that layers know them by."""

from .. import ring

RING_IMPL_DICT = {
    "basic": ring.ring_flash_attn_func,
    "zigzag": ring.zigzag_ring_flash_attn_func,
    "strip": ring.stripe_flash_attn_func,
    "basic_pytorch": ring.ring_pytorch_attn_func,
    "basic_flashinfer": ring.ring_flashinfer_attn_func,
    "basic_npu": ring.ring_npu_flash_attn_func,
}

RING_IMPL_QKVPACKED_DICT = {
    "basic": ring.ring_flash_attn_qkvpacked_func,
    "zigzag": ring.zigzag_ring_flash_attn_qkvpacked_func,
    "strip": ring.stripe_flash_attn_qkvpacked_func,
    "basic_flashinfer": ring.ring_flashinfer_attn_qkvpacked_func,
}
