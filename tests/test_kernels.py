"""Kernels: the reference against autograd, the others against the reference."""

import importlib
import random
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bmt_burst import doctor, kernels
from bmt_burst.bias import kernels as bias_kernels
from bmt_burst.bias.kernels import fa4 as bias_fa4
from bmt_burst.kernels import fa2, fa4
from bmt_burst.kernels.reference import visible
from bmt_burst.kernels.tile_by_tile import blocks_of
from bmt_burst.sequence.tile import KernelCall
from bmt_burst.spec import Spec
from tests.cases import call_tensors, named_calls, random_bias, random_call, random_qkv
from tests.reference import dense_results, kernel_errors, relative_error, size_of_terms
from tests.refusals import refusal

SPEC, CAPPED = Spec(scale=0.3), Spec(scale=0.3, softcap=1.5)
CALLS = named_calls(5)
EXACT = 1e-12  # fp64 rounds at 1e-16; sums have up to 1,000 terms


@pytest.mark.parametrize("kind", CALLS)
def test_what_a_query_sees(kind):
    """Counted one by one, as `KernelCall` says it."""
    call = CALLS[kind]
    expected = torch.zeros(call.q_tokens, call.kv_tokens, dtype=torch.bool)
    for q, kv in call.tiles:
        for i in range(*q):
            for j in range(*kv):
                a, b = i - q[1] + 1, j - kv[1] + 1
                ahead = call.right is None or a + call.right >= b
                expected[i, j] = ahead and (call.left is None or b >= a - call.left)
    assert visible(call).equal(expected)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("softcap", "heads", "kv_heads", "with_bias"),
    [(None, 6, 1, False), (0.5, 4, 2, False), (4.0, 3, 3, False), (None, 4, 2, True)],
)
def test_the_reference_against_autograd(kind, softcap, heads, kv_heads, with_bias):
    """Other kernels are compared with the reference, in tests/conformance."""
    call, spec = CALLS[kind], Spec(0.3, softcap=softcap)
    kernel = (bias_kernels if with_bias else kernels).load("reference")
    q, k, v, dout = call_tensors(call, 2, heads, kv_heads, 8)
    added, options = (), {"softcap": softcap}
    if with_bias:
        bias = random_bias(call, heads, seed=sum(map(ord, kind)))
        added, options = (bias,), {"rows": bias.rows(), "bias": bias.table}
    seen = SimpleNamespace(dense=lambda device: visible(call))
    dense = dense_results(seen, (q, k, v, dout), 0.3, **options)
    out, lse = kernel.forward(q, k, v, call, spec, *added)
    assert relative_error(out, dense[0]) < EXACT
    assert torch.allclose(lse, dense[1], rtol=EXACT, atol=EXACT)
    delta = (out * dout).sum(-1).transpose(1, 2)
    for stands in ((out, lse, None), (None, lse, delta)):
        grads = kernel.backward(dout, q, k, v, *stands, call, spec, *added)
        for mine, other in zip(grads, dense[2:], strict=True):
            assert relative_error(mine, other, size_of_terms(dout, 0.3)) < EXACT


@pytest.mark.parametrize("name", ["cudnn", "aten", "cpu"])
def test_kernels_that_know_no_softcap_refuse_it(name):
    q, k, _, _ = random_qkv(1, 4, 2, 2, 8, torch.bfloat16)
    assert kernels.load(name).refuses(CAPPED, q, k) == kernels.NO_SOFTCAP
    assert kernels.load(name).refuses(SPEC, q, k) != kernels.NO_SOFTCAP


@pytest.mark.parametrize("version", ["2.6.3", "2.7.0.post2", "2.8.3"])
def test_fa2_needs_a_version_of_2_7_or_newer(monkeypatch, version):
    package = SimpleNamespace(__version__=version, flash_attn_interface=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    if version < "2.7":
        with pytest.raises(ImportError, match=r"expected version 2\.7 or newer, got 2\.6\.3"):
            fa2.interface.__wrapped__()
    else:
        assert fa2.interface.__wrapped__() is package.flash_attn_interface


def test_rows_of_a_bias():
    """Counted one by one, as `CallBias` says it; every way to a row is taken."""
    call, ways = CALLS["documents"], set()
    for seed in range(10):
        bias = random_bias(call, 2, seed)
        found, by_distance = bias.rows().tolist(), replace(bias, segments=None).rows().tolist()
        fields = "q_group", "q_base", "kv_group", "kv_segment", "pairs"
        group, base, kv_group, segment, pairs = (
            getattr(bias.segments, name).tolist() for name in fields
        )
        fields = "q_position", "kv_position", "distances"
        position, kv_position, distances = (getattr(bias, name).tolist() for name in fields)
        for i in range(call.q_tokens):
            for j in range(call.kv_tokens):
                if group[i] != kv_group[j]:
                    way, row = "other", bias.segments.other
                elif pairs[base[i] + segment[j]] >= 0:
                    way, row = "pair", pairs[base[i] + segment[j]]
                else:
                    distance = kv_position[j] - position[i]
                    row = distances[max(min(distance, bias.reach), -bias.reach) + bias.reach]
                    way = "far" if abs(distance) > bias.reach else "near"
                    assert by_distance[i][j] == row
                assert found[i][j] == row
                ways.add(way)
    assert ways == {"other", "pair", "near", "far"}


def test_a_bias_is_computed_by_the_same_kernel_or_the_fastest_that_can():
    q, k, _, _ = random_qkv(1, 4, 2, 2, 8, torch.bfloat16)
    for name in ("cpu", "aten", "reference"):
        assert bias_kernels.pick(kernels.load(name), q, k, SPEC).name == "reference"
    with pytest.raises(ValueError, match=r"fa4: .*; triton: .*; reference: .* no values"):
        bias_kernels.pick(kernels.load("cpu"), q.to("meta"), k.to("meta"), SPEC)


@pytest.mark.parametrize(
    ("capability", "kv_heads", "head_size", "deterministic", "version", "refusal"),
    [
        ((9, 0), 4, 72, False, "new", None),
        ((9, 0), 4, 128, False, "old", "lacks aux_scalars"),
        ((10, 0), 4, 128, False, "new", "only on GPUs of compute capability 9"),
        ((9, 0), 2, 128, False, "new", "got 2 and 4"),
        ((9, 0), 4, 192, False, "new", "up to 128, got 192"),
        ((9, 0), 4, 128, True, "new", "not deterministic"),
    ],
)
def test_which_biases_fa4_adds(
    monkeypatch, capability, kv_heads, head_size, deterministic, version, refusal
):
    """An older package does not pass the addresses of a bias on."""
    functions = {"new": lambda q, aux_scalars=None: None, "old": lambda q, aux_tensors=None: None}
    for module in (fa4, bias_fa4):
        monkeypatch.setattr(module, "installed", lambda package: True)
        monkeypatch.setattr(module, "functions", lambda: (functions["new"], functions[version]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        q, k = (
            torch.empty(1, 2, heads, head_size, dtype=torch.bfloat16, device="cuda")
            for heads in (4, kv_heads)
        )
        assert kernels.load("fa4").refuses(Spec(0.3), q, k) is None
        reason = bias_kernels.load("fa4").refuses(Spec(0.3, deterministic), q, k)
    assert (reason is None) if refusal is None else (refusal in reason)


class FlashAttention:
    """The package's functions, written out one sequence after the other, with what is asked of
    their arguments.

    That of FlashAttention-2 has its quirks.
    """

    packed_calls = 0

    def fa4_forward(self, q, k, v, softmax_scale, return_lse, **options):
        assert q.shape[-1] in (64, 96, 128, 192, 256)
        return *self.forward(q, k, v, softmax_scale, **options), None

    def fa4_backward(
        self, q, k, v, out, dout, lse, softmax_scale, deterministic, dlse=None, **options
    ):
        delta = (out * dout).sum(-1).transpose(-1, -2) - (0 if dlse is None else dlse)
        assert lse.is_contiguous()
        return *self.backward(dout, q, k, v, lse, delta, softmax_scale, **options), None

    def fa2_forward(self, q, k, v, *sizes, **options):
        assert options.pop("dropout_p") == 0
        unused = "alibi_slopes", "return_softmax", "block_table"
        assert not any(options.pop(name, None) for name in unused)
        out, lse = self.forward(q, k, v, **self.fa2_options(options, k, sizes))
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return out, lse, None, None

    def fa2_backward(self, dout, q, k, v, out, lse, dq, dk, dv, *sizes, **options):
        assert options.pop("dropout_p") == 0
        assert options.pop("alibi_slopes") is None
        assert options.pop("deterministic") is False
        assert not sizes or not lse.eq(-torch.inf).any()
        delta = (out * dout).sum(-1).transpose(-1, -2)
        grads = self.backward(dout, q, k, v, lse, delta, **self.fa2_options(options, k, sizes))
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    def fa2_options(self, options, k, sizes):
        max_k = sizes[3] if sizes else k.shape[1]
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        options |= dict(zip(names, sizes, strict=bool(sizes)))
        left, right = options.pop("window_size_left"), options.pop("window_size_right")
        left, right = (-1 if bound >= max_k else bound for bound in (left, right))
        if left < 0 <= right:
            left = max_k
        if right < 0 <= left:
            right = max_k
        if left < 0:
            left = right = None
        return {**options, "window_size_left": left, "window_size_right": right}

    def forward(self, q, k, v, softmax_scale, softcap=0.0, **options):
        spec = Spec(softmax_scale, softcap=softcap or None)
        out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
        lse = q.new_full(self.rows(q), torch.nan)
        for rows, columns, call in self.sequences(q, k, **options):
            sides = (x[at][None] for x, at in ((q, rows), (k, columns), (v, columns)))
            part, part_lse = kernels.load("reference").forward(*sides, call, spec)
            out[rows], lse[self.row_places(rows)] = part[0], part_lse[0]
        return out, lse

    def backward(self, dout, q, k, v, lse, delta, softmax_scale, softcap=0.0, **options):
        spec = Spec(softmax_scale, softcap=softcap or None)
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for rows, columns, call in self.sequences(q, k, **options):
            sides = (x[at][None] for x, at in ((dout, rows), (q, rows), (k, columns), (v, columns)))
            stats = (x[self.row_places(rows)][None] for x in (lse, delta))
            parts = kernels.load("reference").backward(*sides, None, *stats, call, spec)
            for grad, at, part in zip(grads, (rows, columns, columns), parts, strict=True):
                grad[at] = part[0]
        return tuple(grads)

    def rows(self, q):
        return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])

    def row_places(self, rows):
        return rows if isinstance(rows, int) else (slice(None), rows)

    def sequences(
        self, q, k, causal, window_size_left=None, window_size_right=None,
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        """Where the tokens of each are, and what is visible there."""
        right = 0 if causal else window_size_right
        if cu_seqlens_q is None:
            for batch in range(len(q)):
                tiles = (((0, q.shape[1]), (0, k.shape[1])),)
                call = KernelCall(q.shape[1], k.shape[1], tiles, window_size_left, right)
                yield batch, batch, call
            return
        self.packed_calls += 1
        bounds = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
        assert [x[0] for x in bounds] == [0, 0]
        assert [x[-1] for x in bounds] == [len(q), len(k)]
        assert {x.dtype for x in (cu_seqlens_q, cu_seqlens_k)} == {torch.int32}
        for rows, columns in zip(*map(pairwise, bounds), strict=True):
            sizes = rows[1] - rows[0], columns[1] - columns[0]
            assert sizes[0] <= max_seqlen_q
            assert sizes[1] <= max_seqlen_k
            tiles = (((0, sizes[0]), (0, sizes[1])),) if all(sizes) else ()
            yield slice(*rows), slice(*columns), KernelCall(*sizes, tiles, window_size_left, right)


@pytest.fixture(params=["fa4", "fa2"])
def flash_attention(request, monkeypatch):
    """A kernel of a FlashAttention package, which is written out."""
    written = FlashAttention()
    monkeypatch.setattr(fa4, "functions", lambda: (written.fa4_forward, written.fa4_backward))
    functions = SimpleNamespace(
        _flash_attn_forward=written.fa2_forward,
        _flash_attn_backward=written.fa2_backward,
        _flash_attn_varlen_forward=written.fa2_forward,
        _flash_attn_varlen_backward=written.fa2_backward,
    )
    monkeypatch.setattr(fa2, "interface", lambda: functions)
    return kernels.load(request.param), written


@pytest.mark.parametrize("kind", CALLS)
def test_sequences_for_flash_attention(flash_attention, kind):
    kernel, written = flash_attention
    call = named_calls(5)[kind]
    tensors = call_tensors(call, 2, 4, 2, 64)
    for with_delta, spec in ((False, SPEC), (True, CAPPED)):
        errors = kernel_errors(kernel, call, tensors, spec, with_delta)
        assert max(errors.values()) < EXACT, errors
    # a CUDA graph may hold a sequence
    assert not (written.packed_calls and call.is_whole and call.q_tokens == call.kv_tokens)


def test_fa4_compiles_no_kernel_for_short_parts_of_sequences():
    """They are packed as several parts are. Only whole sequences are not."""
    tiles = ((0, 300), (0, 700)), ((300, 400), (700, 720))
    several, kernel = KernelCall(400, 720, tiles), kernels.load("fa4")
    for part in (KernelCall.whole(40, 2000), KernelCall.whole(2000, 256)):
        assert kernel.variant(part, 1) == kernel.variant(several, 1)
    whole = [KernelCall.whole(*sizes) for sizes in ((257, 2000), (2000, 2000), (40, 40))]
    assert kernel.variant(whole[0], 1) == kernel.variant(whole[1], 1)
    assert len({kernel.variant(call, 1) for call in (several, *whole)}) == 3


@pytest.mark.parametrize(("most", "taken"), [(1, 1), (3, 2), (4, 4), (7, 4), (8, 8)])
def test_fa4_cuts_large_calls_by_heads(monkeypatch, most, taken):
    """Into whole groups of the four heads that share keys here, or into equal parts of one."""
    written, chance, heads = FlashAttention(), random.Random(3), []

    def forward(q, *args, **options):
        heads.append(q.shape[-2])
        return written.fa4_forward(q, *args, **options)

    monkeypatch.setattr(fa4, "functions", lambda: (forward, written.fa4_backward))
    for seed, call in enumerate([CALLS["causal"], *(random_call(chance) for _ in range(5))]):
        tensors = call_tensors(call, 2, 12, 3, 64, seed=seed)
        monkeypatch.setattr(fa4, "_MOST_ENTRIES", tensors[0][:, :, :most].numel())
        with_delta = chance.choice((False, True))
        errors = kernel_errors(kernels.load("fa4"), call, tensors, SPEC, with_delta)
        assert max(errors.values()) < EXACT, (call, errors)
    assert max(heads) == taken


def test_fa4_computes_no_head_with_too_many_entries(monkeypatch):
    monkeypatch.setattr(fa4, "_MOST_ENTRIES", 64)
    monkeypatch.setattr(fa4, "_MOST_KEY_ENTRIES", 128)
    q, k, v, _ = random_qkv(1, 3, 2, 2, 64)
    with pytest.raises(ValueError, match="q has 192 entries"):
        kernels.load("fa4").forward(q, k, v, KernelCall.whole(3), SPEC)


@pytest.mark.parametrize("kind", ["causal", "documents"])
@pytest.mark.parametrize("head_size", [8, 64, 112, 136, (192, 128), (96, 48)])
def test_fa4_pads_head_sizes(monkeypatch, kind, head_size):
    """But for values whose zeros it can leave out."""
    written, spec, computed = FlashAttention(), SPEC, []
    size, value_size = head_size if isinstance(head_size, tuple) else (head_size, None)

    def forward(q, k, v, *args, **options):
        computed.append((q.shape[-1], v.shape[-1]))
        return written.fa4_forward(q, k, v, *args, **options)

    monkeypatch.setattr(fa4, "functions", lambda: (forward, written.fa4_backward))
    tensors = call_tensors(CALLS[kind], 2, 4, 4 if value_size else 2, size)
    if value_size:
        spec = replace(spec, value_size=value_size)
        for x in tensors[2:]:
            x[..., value_size:] = 0.0
    for with_delta in (False, True):
        errors = kernel_errors(kernels.load("fa4"), CALLS[kind], tensors, spec, with_delta)
        assert max(errors.values()) < EXACT
    assert (computed[0] == head_size) == (head_size == (192, 128))


@pytest.mark.parametrize(
    ("capability", "head_size", "deterministic", "refusal"),
    [
        ((8, 0), 128, False, "it needs compute capability 9.0, "),
        ((9, 0), 192, True, None),
        ((9, 0), 84, False, "up to 256, got 84"),
        ((9, 0), 264, False, "up to 256, got 264"),
        ((10, 0), 128, True, None),
        ((10, 0), 256, False, "up to 128, got 256"),
        ((12, 0), 128, False, None),
        ((12, 0), 128, True, "not deterministic"),
    ],
)
def test_fa4_knows_what_each_gpu_can_do(monkeypatch, capability, head_size, deterministic, refusal):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    monkeypatch.setattr(fa4, "installed", lambda module: True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 2, head_size, dtype=torch.bfloat16, device="cuda")
        reason = kernels.load("fa4").refuses(Spec(1.0, deterministic), q, q)
        capped = kernels.load("fa4").refuses(Spec(1.0, deterministic, softcap=30.0), q, q)
    assert (reason is None) if refusal is None else (refusal in reason)
    if refusal is None:
        assert capped == (None if capability == (9, 0) else kernels.NO_SOFTCAP)


@pytest.fixture
def half_installed(monkeypatch, tmp_path, request):
    """A flash_attn package that fails as the test's parameter says, with a CPU as its GPU."""
    for path, text in request.param.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in (fa4, fa2):
        monkeypatch.setattr(module, "refuses_half", lambda *args, **options: None)
    for forget in (kernels.installed, kernels.import_failure, fa4.functions, fa2.interface):
        forget.cache_clear()
    loaded = set(sys.modules)
    yield
    for name in set(sys.modules) - loaded:
        if name.split(".")[0].startswith("flash_attn"):
            del sys.modules[name]
    for forget in (kernels.installed, kernels.import_failure, fa4.functions, fa2.interface):
        forget.cache_clear()


PACKAGES = {"fa4": "flash-attn-4", "fa2": "flash-attn"}
CUTE = "flash_attn/cute/__init__.py"
CACHE = "class JITPersistentCache: LOCK_TIMEOUT_SECONDS = 15\nCUTE_DSL_CACHE_ENABLED = True"
FA4 = {
    "flash_attn/__init__.py": "",
    CUTE: "",
    "flash_attn/cute/interface.py": "_flash_attn_fwd = _flash_attn_bwd = print",
    "flash_attn/cute/cache_utils.py": CACHE,
}
HALF_INSTALLED = [
    (
        "fa4",
        {"flash_attn/__init__.py": "", CUTE: "raise OSError('libcuda.so.1: no such file')"},
        "OSError: libcuda",
    ),
    ("fa4", FA4 | {"flash_attn/cute/interface.py": ""}, "AttributeError"),
    (
        "fa2",
        {
            "flash_attn_2_cuda.py": "",
            "flash_attn/__init__.py": "raise ImportError('undefined symbol')",
        },
        "symbol",
    ),
    ("fa2", {"flash_attn_2_cuda.py": ""}, "ModuleNotFoundError: No module named 'flash_attn'"),
]


@pytest.mark.parametrize(
    ("half_installed", "name", "reason"),
    [(c[1], c[0], c[2]) for c in HALF_INSTALLED],
    indirect=["half_installed"],
)
def test_auto_passes_on_from_a_package_that_is_half_installed(half_installed, name, reason, caplog):
    q, k, _, _ = random_qkv(1, 4, 2, 2, 8)
    for _ in range(2):
        assert kernels.pick("auto", q, k, SPEC).name == "cpu"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        len([text for text in warnings if text.startswith(f"the package {PACKAGES[name]} is")]) == 1
    )
    assert reason in "".join(warnings)
    with refusal(f"ValueError: {name}: the package {PACKAGES[name]} is installed but .*{reason}"):
        kernels.pick(name, q, k, SPEC)
    with pytest.raises(RuntimeError, match=f"is installed but cannot be used: .*{reason}"):
        doctor._check_kernel(name)


@pytest.mark.parametrize("half_installed", [FA4], indirect=True)
def test_fa4_waits_for_a_process_that_writes_a_kernel_under_load(half_installed):
    assert fa4.functions() == (print, print)
    cache = importlib.import_module("flash_attn.cute.cache_utils").JITPersistentCache
    assert cache.LOCK_TIMEOUT_SECONDS == 600


def test_fa4_refuses_too_many_keys(monkeypatch):
    monkeypatch.setattr(fa4, "installed", lambda package: True)
    q = torch.zeros((), dtype=torch.bfloat16).expand(1, 1 << 19, 32, 128)
    assert "k has 2147483648 entries" in kernels.load("fa4").refuses(SPEC, q, q)
    assert "entries" not in (kernels.load("fa4").refuses(SPEC, q, q[:, 1:]) or "")


def test_blocks_are_what_is_visible():
    """Each visible pair once."""
    chance = random.Random(1)
    for call in [*CALLS.values(), *(random_call(chance) for _ in range(400))]:
        found = torch.zeros(call.q_tokens, call.kv_tokens, dtype=torch.int)
        for rows, columns, part in blocks_of(call):
            assert part.is_whole or part.left is not None
            found[slice(*rows), slice(*columns)] += visible(part).int()
        assert found.equal(visible(call).int()), call
