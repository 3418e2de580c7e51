"""The model: its scalings, presets and checkpointing, rotary positions, generation."""

import dataclasses
import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bmt_burst import IGNORE_INDEX, InfLLMV2, Mask, SequenceParallel, shift_labels, simulate
from bmt_burst.nn import BurstAttention, apply_rope, rope_tables
from bmt_burst.offload import Offload
from models.blocks import Saving
from models.config import PRESETS, CPMConfig
from models.cpm import CPM
from models.huggingface import config_from_hf, config_to_hf
from tests.refusals import refused_line
from tests.rings import on_ranks
from train.data.tokenizer import ByteTokenizer
from train.generate import Sampling, generate
from train.generate import main as generate_main

SMALL = CPMConfig(
    300, 32, 48, 3, 4, 2, 8, scale_emb=12.0, scale_depth=1.4, dim_model_base=16, init_std=0.1
)


def initialized(config: CPMConfig, **options) -> CPM:
    model = CPM(config, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    return model


SHORT, FULL = "sliding_attention", "full_attention"
SLIDING = {"model_type": "mistral", "sliding_window": 5}
MIXED = {"model_type": "ministral", "sliding_window": 5}


@pytest.mark.parametrize(
    ("change", "window", "pattern"),
    [
        ({"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}, None, "w"),
        (SLIDING | {"sliding_window": None}, None, "w"),
        (SLIDING, 5, "w"),
        (MIXED, 5, "w"),
        (MIXED | {"layer_types": [FULL] * 3}, None, "w"),
        (MIXED | {"layer_types": [SHORT, FULL, SHORT]}, 5, "wf"),
    ],
)
def test_windows_come_from_hugging_face(change, window, pattern):
    plain = dataclasses.replace(SMALL, scale_emb=1.0, scale_depth=None, dim_model_base=None)
    config = config_from_hf({**config_to_hf(plain), **change})
    assert (config.window, config.window_pattern) == (window, pattern)
    assert config.windows == tuple(window if x == "w" else None for x in (pattern * 3)[:3])


SIZES = {  # billions of parameters
    "minicpm-1b": 1.36,
    "minicpm-2b": 2.72,
    "minicpm4-0.5b": 0.434,
    "minicpm4-8b": 8.19,
    "minicpm4.1-8b": 8.19,
    "minicpm-sala": 9.477,
    "sala-tiny": 0.000944,
    "minicpm5-1b": 1.08,
    "minicpm5-2b": 2.516756480,
    "llama3-8b": 8.03,
    "llama3.1-8b": 8.03,
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "7b": 6.74,
    "14b": 13.9,
    "cpm-tiny": 0.000829,
}


def test_presets_have_their_size():
    assert PRESETS.keys() == SIZES.keys()
    for preset, config in PRESETS.items():
        assert config.num_parameters / 1e9 == pytest.approx(SIZES[preset], rel=0.01), preset
    for preset in ("minicpm4-0.5b", "qwen2.5-7b", "qwen3-0.6b", "7b"):
        with torch.device("meta"):
            counted = sum(p.numel() for p in CPM(PRESETS[preset]).parameters())
        assert counted == PRESETS[preset].num_parameters, preset


def test_impossible_shapes_are_refused():
    for change in (
        *({"num_kv_heads": 3}, {"head_dim": 7}, {"head_dim": None}, {"tie_embeddings": "no"}),
        *({"num_layers": wrong} for wrong in (0, 2.5, True)),
        *({"rope_theta": 0.0}, {"scale_emb": math.nan}, {"init_std": -1}, {"dim_model_base": 0}),
        *({"window_pattern": wrong, "window": 4} for wrong in ("", "ff", "wl", "wwww")),
        *({"window_pattern": "wf"}, {"window": 0}, {"qkv_bias": 1}, {"qk_norm": None}),
        {"rope_scaling": {"kind": "linear", "factor": 0.5}},
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            dataclasses.replace(SMALL, **change)


def test_sequence_parallel_model_equals_whole_model():
    """Losses and gradients of a model over 3 simulated ranks. One of them has all targets."""
    tokens = torch.randint(0, 300, (2, 31), generator=torch.Generator().manual_seed(3))
    labels = shift_labels(tokens)
    labels[:, :25] = IGNORE_INDEX  # in a contiguous layout only the last rank has targets
    whole = initialized(SMALL)
    total, count = whole(tokens, torch.arange(31), labels)
    (total / count).backward()

    def work(ring):
        sp = SequenceParallel(ring.rank, ring.size, "contiguous", process_group=ring)
        model = initialized(SMALL, sp=sp)
        loss, targets = model(sp.shard(tokens), sp.positions(31), sp.shard(labels))
        (loss / count).backward()
        return loss.detach(), targets, {name: p.grad for name, p in model.named_parameters()}

    losses, targets, grads = zip(*simulate(3, work), strict=True)
    assert [int(t) for t in targets] == [0, 0, int(count)]
    assert torch.allclose(sum(losses), total, rtol=1e-6)
    for name, parameter in whole.named_parameters():
        total = sum(g[name] for g in grads)
        assert torch.allclose(total, parameter.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("saving", "share", "recomputed"),
    [
        (Saving("selective"), 0.6, 0),
        (Saving("full"), 0.3, 1),
        (Saving("full", blocks=1), 0.8, 1 / SMALL.num_layers),
    ],
)
def test_checkpointing_changes_what_is_saved_and_nothing_else(saving, share, recomputed):
    """Losses and gradients are equal bit for bit. The ring runs again in the backward only if
    blocks are recomputed in full.
    """
    tokens = torch.randint(0, 300, (1, 46), generator=torch.Generator().manual_seed(3))
    labels = shift_labels(tokens)

    def run(ring, saving):
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        model = initialized(SMALL, sp=sp, saving=saving)
        saved = []
        with saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            loss, _ = model(sp.shard(tokens), sp.positions(46), sp.shard(labels))
        forward = len(ring.traffic)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        return loss.detach(), grads, sum(saved), forward, len(ring.traffic)

    plain = simulate(2, lambda ring: run(ring, Saving()))
    mine = simulate(2, lambda ring: run(ring, saving))
    for (loss, grads, saved, forward, total), (same, expected, all_saved, _, all_sent) in zip(
        mine, plain, strict=True
    ):
        assert loss.equal(same)
        assert all(grad.equal(expected[name]) for name, grad in grads.items())
        assert total == all_sent + recomputed * forward  # agreement included
        assert saved <= share * all_saved


def test_saving_is_checked():
    for message, arguments in (
        ("none, selective, full", {"checkpointing": "some"}),
        ("blocks must be at least 0 and needs checkpointing", {"blocks": 1}),
        ("got -1 with 'full'", {"checkpointing": "full", "blocks": -1}),
        ("offload needs checkpointing", {"offload": Offload()}),
        ("tile must be at least 1, got 0", {"tile": 0}),
        ("every must be at least 2 and needs .*got 1", {"checkpointing": "full", "every": 1}),
        ("every must .* got 2 with 'none'", {"every": 2}),
        ("every=2 excludes blocks=1", {"checkpointing": "full", "blocks": 1, "every": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            Saving(**arguments)


def test_rope_depends_on_distance_alone_and_stays_exact_far_out():
    x, y = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def score(m, n):
        turned = [
            apply_rope(t, *(c.double() for c in rope_tables(torch.tensor([p]), 64)))
            for t, p in ((x, m), (y, n))
        ]
        return float((turned[0] * turned[1]).sum())

    near = score(7, 3)
    assert score(1_000_007, 1_000_003) == pytest.approx(near, rel=1e-4, abs=1e-4)


def test_layer_refuses_impossible_heads():
    for kind, message, sizes, named in (
        (ValueError, "num_heads=4 does not divide hidden_size=130", (130, 4), {}),
        (ValueError, "num_kv_heads=3 does not divide num_heads=4", (32, 4, 3), {}),
        (ValueError, "window must be at least 1, got 0", (32, 4), {"window": 0}),
        (ValueError, "qk_norm_eps must be positive", (32, 4), {"qk_norm_eps": 0.0}),
        (ValueError, "even head_dim above 0, got 0", (32, 4), {"head_dim": 0}),
        (TypeError, "num_kv_heads must be a whole number, got True", (32, 4, True), {}),
        (TypeError, r"window must be a whole number, got 4\.0", (32, 4), {"window": 4.0}),
    ):
        with pytest.raises(kind, match=message):
            BurstAttention(*sizes, **named)


def test_a_layers_window_and_sparse_are_those_of_its_kind():
    """So neither can be changed without an effect."""
    layer = BurstAttention(32, 4, window=4)
    assert (layer.window, layer.sparse) == (4, None)
    for name in ("window", "sparse"):
        with pytest.raises(AttributeError):
            setattr(layer, name, None)
    layer.kind = dataclasses.replace(layer.kind, window=9)
    assert layer.window == 9
    assert BurstAttention(32, 4, sparse=InfLLMV2()).sparse == InfLLMV2()


def test_sampling_is_seeded_and_settings_are_checked():
    model, tokenizer = initialized(SMALL), ByteTokenizer()
    texts = [
        generate(model, tokenizer, "ab", 12, Sampling(seed=seed, top_k=40, top_p=0.9))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("ab")
    greedy = generate(model, tokenizer, "ab", 5, Sampling(temperature=0))
    for options in ({"top_k": 1}, {"temperature": 1e-320}):
        assert generate(model, tokenizer, "ab", 5, Sampling(**options)) == greedy


def test_generate_refuses_in_a_line(capsys):
    for option, value, message in (
        ("temperature", "nan", "--temperature must be finite and not negative, got nan"),
        ("top-p", "nan", "--top-p must be above 0 and at most 1, got nan"),
        ("top-k", "-1", "--top-k must not be negative, got -1"),
        ("tokens", "-1", "--tokens must be at least 0 and below 2^31, got -1"),
        ("tokens", "some", "argument --tokens: invalid int value: 'some'"),
        ("seed", str(2**64), "--seed must be at least 0 and below 2^63"),
        ("run", "nowhere", "there is no checkpoint in nowhere"),
    ):
        printed = refused_line(capsys, generate_main, "--run", "nowhere", f"--{option}", value)
        assert printed.startswith(f"generate.py: {message}")


@pytest.mark.parametrize(
    ("wanted", "with_labels", "message"),
    [
        ({"last": 6}, False, "last must be 0 to 5, this rank's tokens, got 6"),
        ({"last": -1}, False, "last must be 0 to 5, this rank's tokens, got -1"),
        ({"last": True}, False, "last must be a whole number, got True"),
        ({"last": 0}, True, "expected last=0 or labels, got both: leave out last"),
        ({"logprobs": True}, False, "expected labels with logprobs=True, got none"),
        ({"by_row": True}, False, "expected labels with by_row=True, got none"),
        (
            {"by_token": True, "logprobs": True},
            True,
            "expected one of by_token and logprobs, got 2 of them",
        ),
    ],
)
def test_wrong_wishes_for_results_raise_on_all_ranks(wanted, with_labels, message):
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    labels = tokens if with_labels else None

    def work(sp):
        wrong, said = {} if sp.rank else wanted, []  # on the first rank
        sequence = sp.sequence(Mask.causal(10))
        for model, of_ranks in ((CPM(SMALL, sp), None), (CPM(SMALL), sequence)):
            with pytest.raises((TypeError, ValueError)) as caught:
                model(tokens, torch.arange(5), labels, mask=of_ranks, **wrong)
            said.append(str(caught.value))
        return said

    for said in on_ranks(2, work):
        assert all(message in text for text in said)
