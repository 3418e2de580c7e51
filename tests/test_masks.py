"""Any mask, in any layout, equals dense attention: out, lse, dq, dk, dv in fp64 to 1e-10, through
the simulator.
"""

import random

import pytest

from bmt_burst import Layout, Mask
from bmt_burst.sequence import gathered_calls
from tests.cases import random_layout, random_mask, random_qkv
from tests.reference import attention_errors, dense_results
from tests.rings import CPU_KERNELS, ring_results

# ranks, and those of a host
RINGS = [*((size, size) for size in range(1, 9)), (4, 2), (6, 3), (6, 2), (8, 4), (4, 1)]
HEADS = [(2, 2), (4, 2), (3, 1)]
SCALE = 0.31
CASES = 80  # tests/conformance has other random ones
PARTS = 4  # tests that share them


@pytest.mark.parametrize("part", range(PARTS))
def test_any_mask_equals_dense(part, monkeypatch):
    for seed in range(part, CASES, PARTS):
        chance = random.Random(seed)
        monkeypatch.setattr(gathered_calls, "_GAP", chance.choice((0, 3, 256)))
        size, inner = RINGS[seed % len(RINGS)]
        mask = random_mask(chance, chance.randint(size, 70))
        layout = random_layout(chance, mask, size)
        batch, heads = chance.choice((1, 1, 2)), chance.choice(HEADS)
        tensors = random_qkv(batch, mask.seq_len, *heads, 8, seed=seed)
        options = {
            "mask": mask,
            "backward": chance.choice(("q", "kv")),
            "flash": chance.choice(CPU_KERNELS),
            "optimize_bwd_comm": chance.random() < 0.7,
            "group_bytes": chance.choice((0, 5_000, 20_000, 1 << 30)),
        }
        check(layout, tensors, inner, **options)


def check(layout, tensors, inner, *, mask, **options):
    """Compare a ring with dense attention."""
    got = ring_results(layout, tensors, SCALE, inner, mask=mask, **options)
    errors = attention_errors(got, dense_results(mask, tensors, SCALE), tensors[3], SCALE)
    assert max(errors.values()) < 1e-10, (errors, layout, mask, options)


class LongMiddle(Layout):
    """Contiguous, and most tokens are on the second of four ranks."""

    name = "long middle"

    def ranges(self, rank):
        ends = (0, 3, self.seq_len - 6, self.seq_len - 3, self.seq_len)
        return [range(ends[rank], ends[rank + 1])]


@pytest.mark.parametrize("inner", [2, 4])
def test_the_longest_shard_may_be_anywhere(inner):
    """Deliveries reserve memory for its blocks."""
    tensors = random_qkv(1, 60, 4, 2, 8)
    check(LongMiddle(60, 4), tensors, inner, mask=Mask.full(60), group_bytes=0)
