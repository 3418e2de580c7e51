"""Models with lightning layers: their configuration, their loss on any ranks, their logits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from bmt_burst import IGNORE_INDEX, Cache, Chunks, Decoder, Layout, Mask, shift_labels, simulate
from bmt_burst.fused.functions import RMSNorm, _Norm
from bmt_burst.lightning import triton_kernel
from bmt_burst.lightning.memory import StateMemory
from bmt_burst.lightning.rates import ConstantRates
from bmt_burst.lightning.segments import Edges, Segments, plan_states
from bmt_burst.nn import find_part, rope_tables
from bmt_burst.offload import Offload
from bmt_burst.planning import META, Ledger, LightningShape
from bmt_burst.ranks.sequence_parallel import SequenceParallel
from bmt_burst.transport import LANES
from models.blocks import Saving
from models.config import PRESETS, CPMConfig
from models.cpm import CPM
from models.hf_config import config_from_hf, config_to_hf
from models.huggingface import load_cpm, read_folder, save_weights
from tests import sala
from tests.launcher import run_script
from tests.runs import train, written_text
from tests.test_chunks import on_ranks
from tests.test_sparse import SMALL as SPARSE
from train.data.batches import Batches
from train.data.folder import Row
from train.data.tokenizer import ByteTokenizer
from train.export import main as export_main
from train.generate import main as generate_main
from train.generation.decoding import Speed, _compute
from train.loop.inputs import check_kernel
from train.loop.measure import step_flops
from train.planning.search import CHUNKS, Cluster, plan, possible_chunks
from train.planning.seconds import _BACKWARD_TENSORS, _FORWARD_TENSORS, H200
from train.planning.units import Shape, find_unit
from train.settings.config import TrainConfig
from train.trained.model import load_model

SMALL = CPMConfig(
    320, 32, 48, 5, 4, 2, 8, rms_norm_eps=1e-6, scale_emb=12.0, scale_depth=1.4, dim_model_base=16,
    tie_embeddings=False, init_std=0.1, attention_rotary=False, attention_gate=True,
    mixers=("attention", "lightning", "lightning", "attention", "lightning"),
)  # fmt: skip
BORDERS = (0, 1, 30, 57, 90)
# released fields that change no result
NO_MATTER = {"auto_map", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"}
NO_MATTER |= {"shift_labels", "torch_dtype", "use_cache", "rope_scaling"}
TOKENS = torch.randint(320, (1, 90), generator=torch.Generator().manual_seed(7))


def initialized(config=SMALL, **options):
    """Return a model in fp64. Weights of norms are random, too."""
    model = CPM(config, **options).double()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        model.init_parameter(name, weight.data, generator)
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def loss_and_gradients(model, sp, layout, borders=BORDERS, tokens=TOKENS):
    """Return this rank's sum of losses and its gradients."""
    model = copy.deepcopy(model)
    model.attach(sp)
    mask = Mask.documents(borders)
    labels = shift_labels(tokens, mask=mask)
    mine = [layout.shard(x, sp.rank) for x in (tokens, labels, mask.positions().unsqueeze(0))]
    loss, _ = model(mine[0], mine[2], mine[1], mask=mask, layout=layout)
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


def assert_equal(found, exact, bound):
    """Compare losses and gradients, also their norm."""
    for mine, expected in zip(found, exact, strict=True):
        assert (mine - expected).norm() <= bound * expected.norm()
    mine, expected = (
        torch.cat([x.flatten() for x in grads[1:]]).norm() for grads in (found, exact)
    )
    assert abs(mine - expected) <= bound * expected


def test_the_preset_is_the_release():
    config = PRESETS["minicpm-sala"]
    assert config.num_parameters == 9_477_203_968  # 18.954 GB in bf16, as published
    assert config.lightning_layers == 24 and config.attention_layers == tuple(
        layer for layer, mixer in enumerate(sala.RELEASED_MIXERS) if mixer == "minicpm4"
    )
    assert CPMConfig.from_dict(config.to_dict()) == config
    tiny = PRESETS["sala-tiny"]
    assert tiny.num_parameters == sum(p.numel() for p in CPM(tiny).parameters())
    vectors = sum(p.numel() for p in CPM(tiny).parameters() if p.dim() == 1)
    assert tiny.num_vector_parameters == vectors


def test_mixers_are_checked():
    for mixers in (("lightning",) * 4, ("softmax",) * 5, "lightning", ("lightning",) * 4 + (None,)):
        with pytest.raises(ValueError, match="mixers must be attention or lightning for each of 5"):
            dataclasses.replace(SMALL, mixers=mixers)
    with pytest.raises(ValueError, match="expected a window or lightning layers, got window=8 and"):
        dataclasses.replace(SMALL, window=8)
    same = dataclasses.replace(SMALL, mixers=["attention"] * 5)
    assert same.num_parameters == dataclasses.replace(SMALL, mixers=None).num_parameters


@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["dense", "sparse"])
def test_loss_and_gradients_do_not_depend_on_the_ranks(sparse):
    model = initialized(dataclasses.replace(SMALL, sparse=sparse))
    exact = loss_and_gradients(model, SequenceParallel(), Layout.zigzag(90, 1))
    sizes = ((2, "zigzag"), (3, "contiguous"), (4, "zigzag"), (8, "balanced"))
    for size, name in sizes if sparse is None else sizes[:2]:
        mask = Mask.documents(BORDERS)
        layout = Layout.balanced(mask, size) if name == "balanced" else Layout.named(name, 90, size)

        def work(ring, size=size, layout=layout):
            sp = SequenceParallel(ring.rank, size, process_group=ring)
            return loss_and_gradients(model, sp, layout)

        assert_equal([*map(sum, zip(*simulate(size, work), strict=True))], exact, 1e-12)


def test_packed_documents_have_the_loss_and_gradients_of_those_alone():
    model = initialized()
    alone = [
        loss_and_gradients(
            model, SequenceParallel(), Layout.zigzag(b - a, 1), (0, b - a), TOKENS[:, a:b]
        )
        for a, b in itertools.pairwise(BORDERS)
    ]
    packed = loss_and_gradients(model, SequenceParallel(), Layout.zigzag(90, 1))
    assert_equal(packed, [*map(sum, zip(*alone, strict=True))], 1e-12)


def train_steps(config, ranks, chunk, saving, steps=2):
    """Return the losses of steps on changing documents, each in chunks and over so many ranks."""

    def work(sp):
        model, losses = initialized(config, sp=sp, saving=saving), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        chance = torch.Generator().manual_seed(1)
        for step in range(steps):
            mask = Mask.documents((0, 30 + step % 30, 57 + step % 30, 90))
            tokens = torch.randint(320, (1, 90), generator=chance)
            whole = tokens, mask.positions().unsqueeze(0), shift_labels(tokens, mask=mask)
            chunks = Chunks(mask, chunk or 90, config.num_layers, sp)
            mine, losses_of_parts = [chunks.layout.shard(x, sp.rank) for x in whole], []
            for part in chunks.forward() if chunk else ():
                model(*(x[:, part.span] for x in mine), cache=part)
            for part in chunks.backward() if chunk else [None]:
                how = {"cache": part} if part else {"mask": mask, "layout": chunks.layout}
                loss, _ = model(*(x[:, part.span] if part else x for x in mine), **how)
                (loss / 87).backward()
                losses_of_parts.append(loss.detach())
            for parameter in model.parameters():
                parameter.grad = sp.sum(parameter.grad)
            losses.append(sp.sum(torch.stack(losses_of_parts).sum()) / 87)
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses)

    return on_ranks(ranks, work)[0]


@pytest.mark.parametrize(
    ("sparse", "ways"),
    [
        (None, [(1, 25, Saving("full")), (4, 31, Saving("full", every=2))]),
        (SPARSE, [(2, 40, Saving("selective"))]),
    ],
    ids=["dense", "sparse"],
)
def test_losses_of_steps_do_not_depend_on_chunks_and_ranks(sparse, ways):
    config = dataclasses.replace(SMALL, sparse=sparse)
    expected = train_steps(config, 1, None, Saving())
    for ranks, chunk, saving in ways:
        found = train_steps(config, ranks, chunk, saving)
        assert (found - expected).abs().max() < 1e-9, (ranks, chunk)


SAVINGS = [
    Saving("selective"),
    Saving("selective", blocks=2, tile=30),
    Saving("full", tile=30),
    Saving("selective", every=2),
    Saving("full", every=3),
    Saving("full", offload=Offload()),
]


def run_on_two_ranks(config, saving, has_hooks=False):
    """Return loss and gradients, and how many messages of a state or more the ranks sent."""

    def work(ring):
        model = initialized(config, saving=saving)
        for block in model.layers if has_hooks else ():  # which then calls its modules
            block.mlp.register_forward_hook(lambda *_: None)
        sp = SequenceParallel(ring.rank, 2, process_group=ring)
        found = loss_and_gradients(model, sp, Layout.zigzag(90, 2))
        return found, sum(sent >= 4 * 8 * 8 * 8 for _, sent in ring.traffic)

    found, sent = zip(*simulate(2, work), strict=True)
    return [*map(sum, zip(*found, strict=True))], sum(sent)


def test_all_ways_to_save_are_equal():
    """Also where modules of a block are called alone."""
    exact, _ = run_on_two_ranks(SMALL, Saving())
    for saving in SAVINGS:
        assert_equal(run_on_two_ranks(SMALL, saving)[0], exact, 1e-13)
    assert_equal(run_on_two_ranks(SMALL, Saving("full"), has_hooks=True)[0], exact, 1e-13)


def test_recomputations_send_no_states():
    """Of layers without keys and values, which "full" sends again."""
    config = dataclasses.replace(SMALL, num_layers=3, mixers=("lightning",) * 3)
    _, sent = run_on_two_ranks(config, Saving())
    assert sent == 3 * 2 * 2, "layers, directions, and runs that take a state of another rank"
    for saving in (Saving("selective"), Saving("full"), Saving("full", every=2)):
        assert run_on_two_ranks(config, saving)[1] == sent


def test_selective_checkpointing_saves_less_and_normalizes_again():
    """No block saves its normalized input, which its gate needs again."""
    saved = {}
    for kind in ("none", "selective", "full"):
        model, sizes = initialized(saving=Saving(kind)), []
        with saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x):
            model(TOKENS, torch.arange(90), shift_labels(TOKENS))
        saved[kind] = sum(sizes)
    assert saved["full"] < saved["selective"] < 0.8 * saved["none"]


def test_logits_are_those_of_the_released_layers():
    """Below 8,192 tokens, in fp32, and with its sparse_config."""
    config = dataclasses.replace(SMALL, sparse=PRESETS["minicpm-sala"].sparse)
    model = initialized(config).float()
    weights = {
        n if n == "lm_head.weight" else f"model.{n}": x for n, x in model.state_dict().items()
    }
    tokens = torch.randint(320, (2, 300))
    exact = sala.logits({n: x.double() for n, x in weights.items()}, sala.SMALL, tokens)
    found = model(tokens, torch.arange(300))
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_rows_have_documents_and_layouts_of_their_own():
    model = initialized()
    tokens = torch.cat((TOKENS, TOKENS.flip(1)))
    masks = Mask.documents(BORDERS), Mask.causal(90)
    labels = torch.cat(
        [shift_labels(row, mask=mask) for row, mask in zip(tokens.split(1), masks, strict=True)]
    )
    positions = torch.stack([mask.positions() for mask in masks])
    loss, count, rows = model(tokens, positions, labels, mask=masks, by_row=True)
    for row, mask in enumerate(masks):
        one = slice(row, row + 1)
        alone, _ = model(tokens[one], positions[one], labels[one], mask=mask)
        assert abs(alone - rows[row]) <= 1e-12 * alone
    assert count == (labels != IGNORE_INDEX).sum() and abs(rows.sum() - loss) <= 1e-12 * loss


def test_a_released_config_is_read_and_written():
    """All fields that change a result are the same again."""
    config = config_from_hf(sala.RELEASED)
    preset = PRESETS["minicpm-sala"]
    assert dataclasses.replace(config, max_position_embeddings=None) == preset
    written = config_to_hf(config)
    assert {**sala.RELEASED, **written} == {**written, **{n: sala.RELEASED[n] for n in NO_MATTER}}
    assert config_from_hf(written) == config
    others = ["lightning" if layer % 2 else "lightning_attn" for layer in range(32)]
    aliases = config_from_hf(sala.RELEASED | {"mixer_types": others})
    assert aliases.lightning_layers == 32
    nulls = dict.fromkeys(("num_key_value_heads", "lightning_nkv", "lightning_nh"))
    assert config_from_hf(sala.RELEASED | nulls).num_kv_heads == 32
    dense = config_from_hf(sala.RELEASED | {"sparse_config": None})
    assert dense == dataclasses.replace(config, sparse=None)
    assert config_from_hf(config_to_hf(dense)) == dense
    rotated = config_from_hf(sala.RELEASED | {"attn_use_rope": True, "attn_use_output_gate": False})
    assert rotated.attention_rotary and not rotated.attention_gate
    assert config_from_hf(config_to_hf(rotated)) == rotated


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lightning_nh": 16}, "lightning_nh must be num_attention_heads, 32, got 16"),
        ({"lightning_nkv": 2}, "lightning_nkv must be lightning_nh, 32, got 2"),
        ({"lightning_nkv": None}, "must be lightning_nh, 32, got 2, from num_key_value_heads"),
        ({"lightning_head_dim": 64}, "lightning_head_dim must be head_dim, 128, got 64"),
        ({"mixer_types": ["minicpm4"] * 31}, "must be one of .* each of 32 layers .*got 31 names"),
        ({"mixer_types": ["mamba"] * 32}, "mixer_types must be one of .*minicpm4.*'mamba'"),
        ({"mixer_types": [["minicpm4"]] * 32}, "mixer_types must be one of"),
        ({"mixer_types": None}, "mixer_types must be one of .* got None"),
        ({"lightning_scale": "1/d"}, "lightning_scale must be '1/sqrt.d.', .* got '1/d'"),
        ({"lightning_scale": None}, "lightning_scale must be .* got nothing"),
        ({"lightning_use_rope": False}, "lightning_use_rope must be true, .* got false"),
        ({"qk_norm": False}, "qk_norm must be true, as lightning layers compute it, got false"),
        ({"use_output_norm": 1}, "use_output_norm must be true, .* got 1"),
        ({"use_output_gate": None}, "use_output_gate must be true, .* got nothing"),
        ({"attn_use_rope": None}, "attn_use_rope must be true or false, got nothing"),
        ({"attn_use_output_gate": "yes"}, "attn_use_output_gate must be true or false, got 'yes'"),
        ({"lightning_layerwise_decay": True}, "lightning_layerwise_decay is not computed"),
        ({"attn_logits_scaling": 100}, "attn_logits_scaling is not computed: .* got 100"),
        ({"quantization_config": {"bits": 4}}, "unsupported fields {'quantization_config'"),
        ({"attention_bias": True}, "unsupported fields {'attention_bias': True"),
        ({"mup_denominator": 16}, "unsupported fields {'mup_denominator': 16"),
        ({"scale_depth": None}, r"config.json lacks \['scale_depth'\]"),
        ({"sliding_window": 512}, "cannot tell which layers of a minicpm_sala have a window"),
        ({"sparse_config": {"top_k": 3}}, "sparse_config: expected some of"),
    ],
    ids=str,
)
def test_other_configs_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(sala.RELEASED | changed)


def test_models_that_no_folder_has_are_refused():
    for name in ("qk_norm", "qkv_bias"):
        with pytest.raises(ValueError, match=f"nearest: minicpm_sala without {name}=True"):
            config_to_hf(dataclasses.replace(SMALL, **{name: True}))


def test_a_folder_is_written_and_read(tmp_path):
    """Under the released names, and with equal logits."""
    model = initialized().float()
    save_weights(tmp_path, model.config, model.state_dict())
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    of_lightning = {"q_proj", "k_proj", "v_proj", "o_proj", "z_proj", "q_norm", "k_norm", "o_norm"}
    for layer, expected in (
        (1, of_lightning),
        (0, {"q_proj", "k_proj", "v_proj", "o_proj", "o_gate"}),
    ):
        prefix = f"model.layers.{layer}.self_attn."
        found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        assert found == {f"{name}.weight" for name in expected}
    assert not list(tmp_path.glob("*.py")) and "auto_map" not in read_folder(tmp_path)
    read = load_cpm(tmp_path)
    assert read.config == dataclasses.replace(model.config, init_std=read.config.init_std)
    places = torch.arange(90)
    assert read(TOKENS, places).equal(model(TOKENS, places))


@torch.no_grad()
@pytest.mark.parametrize("sparse", [None, SPARSE], ids=["dense", "sparse"])
def test_generation_goes_on_from_a_whole_forward(sparse):
    """In pieces of a prompt, then token by token. Only attention layers keep keys."""
    config = dataclasses.replace(SMALL, sparse=sparse)
    model, places = initialized(config), torch.arange(90)
    whole, cache = model(TOKENS, places), Cache(None, config.num_layers, 90)
    cuts = (0, 33, 70, *range(71, 91))
    pieces = [model(TOKENS[:, a:b], places[a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
    assert (torch.cat(pieces, 1) - whole).abs().max() <= 1e-10 * whole.abs().max()
    states = {n: m.states[-1] for n, m in cache._memories.items() if isinstance(m, StateMemory)}
    assert sorted(states) == [1, 2, 4]
    assert all(state.shape == (1, 4, 8, 8) for state in states.values())


@torch.no_grad()
@pytest.mark.parametrize("dense_len", [-1, 60, 90, 91])
def test_logits_do_not_depend_on_the_pieces_of_a_prompt(dense_len):
    """A prompt of dense_len tokens is sparse from its first token on."""
    config = dataclasses.replace(SMALL, sparse=dataclasses.replace(SPARSE, dense_len=dense_len))
    model = initialized(config)
    whole = model(TOKENS, torch.arange(90))[:, -1]
    for chunk in (7, 64, None):
        decoder = Decoder(model, Cache(None, config.num_layers, 90))
        found = _compute(model, decoder, TOKENS[0].tolist(), 0, chunk, Speed())[:, -1]
        assert (found - whole).abs().max() <= 1e-10 * whole.abs().max()


def test_options_that_exclude_lightning_layers_are_refused_by_name():
    for option, value, message in (
        ("layout", "striped", "--layout striped excludes lightning layers"),
        ("window", 8, "--window with --model sala-tiny: expected a window or lightning layers"),
    ):
        config = TrainConfig(model="sala-tiny", seq_len=64, **{option: value})
        with pytest.raises(ValueError, match=message):
            config.model_config()


@pytest.mark.parametrize(
    ("flash", "expected"), [("triton", "triton"), ("reference", "reference"), ("fa4", "auto")]
)
def test_lightning_layers_take_the_kernel_of_flash_if_there_is_one(flash, expected):
    assert CPM(SMALL, flash=flash).layers[1].self_attn.kind.flash == expected


def test_a_kernel_that_lightning_layers_cannot_have_is_refused_at_the_start(monkeypatch):
    """Heads of 8 are too small for that of lightning attention only."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = TrainConfig(flash="triton", dtype="bf16")
    with FakeTensorMode():
        check_kernel(config, dataclasses.replace(SMALL, mixers=None), torch.device("cuda"))
        message = "--flash triton: no kernel for flash='triton'.*: head size must be a mul"
        with pytest.raises(ValueError, match=message):
            check_kernel(config, SMALL, torch.device("cuda"))


def test_flops_are_those_of_each_mixer():
    config, tokens = PRESETS["minicpm-sala"], 1000
    dense = dataclasses.replace(config, mixers=None)
    assert step_flops(dense, tokens, 7) == 6 * dense.num_multiplied * tokens + 12 * 4096 * 7
    of_mixers = step_flops(config, tokens, 7) - 6 * config.num_multiplied * tokens - 12 * 4096 * 7
    of_token = of_mixers / tokens / 24
    assert of_token == 14 * 4096 * (128 + 64)
    assert of_token == pytest.approx(3.1e6 + 7.8e6, rel=0.02)


@pytest.mark.usefixtures("alone")
def test_batches_count_pairs_of_attention_layers_only():
    settings = {"seq_len": 64, "batch_size": 1, "micro_batch_size": 1}
    for model, layers in ((PRESETS["sala-tiny"], 1), (PRESETS["cpm-tiny"], 4)):
        config = TrainConfig(model="sala-tiny", **settings)
        batches = Batches(config, model, SequenceParallel(), torch.device("cpu"))
        assert batches._whole.work == (layers * 64 * 65 // 2,)
    alone = dataclasses.replace(PRESETS["sala-tiny"], mixers=("lightning",) * 4)
    assert Batches(config, alone, SequenceParallel(), torch.device("cpu"))._whole.work == (0,)


@pytest.mark.usefixtures("alone")
@torch.no_grad()
def test_evaluations_do_not_depend_on_chunks():
    """Losses of rows, and of tokens with the most likely ones."""
    model, found = initialized(), []
    labels = shift_labels(TOKENS, mask=Mask.documents(BORDERS))
    rows = [Row(TOKENS[0], labels[0], BORDERS), Row(TOKENS[0].flip(0), labels[0], (0, 90))]
    for chunk in (None, 25):
        config = TrainConfig(seq_len=90, batch_size=2, micro_batch_size=2, chunk=chunk)
        batches = Batches(config, SMALL, SequenceParallel(), torch.device("cpu"))
        batch = batches._make(SimpleNamespace(documents=True), rows, (0, 0))
        found.append([*batch.losses(model), *batch.score_tokens(model)])
    for whole, in_chunks in zip(*found, strict=True):
        assert torch.allclose(whole.double(), in_chunks.double(), rtol=1e-10)


def test_plans_have_states_and_the_parameters_of_each_layer():
    """A plan of one layer of each kind: 16 KiB a token more for k and v, and less attention."""

    def planned(**change):
        options = {"model": "minicpm-sala", "seq_len": 1 << 17, "sp_size": 2, "dtype": "bf16"}
        options |= {"batch_size": 1, "checkpointing": "selective", "engine": "torch"}
        return plan(TrainConfig(**options | change), Cluster(2, 140.0, H200), "torch")

    sala_plan = planned()
    shapes = [run.shape for run in sala_plan.step.attention]
    of_lightning = [shape for shape in shapes if isinstance(shape, LightningShape)]
    assert {shape.rank_tokens for shape in of_lightning} == {1 << 16}
    counts = {run: n for run, n in sala_plan.step.attention.items() if run.run == "backward"}
    assert sorted(counts.values()) == [8, 24]
    saved = [
        find_unit(
            Shape(PRESETS["minicpm-sala"], torch.bfloat16, saving=Saving(kind), mixers=(mixer,)),
            1 << 16,
        ).saved
        for kind, mixer in itertools.product(("selective", "full"), ("attention", "lightning"))
    ]
    tokens, lse = 1 << 16, 32 * 4
    of_attention, of_states = (saved[i] - saved[2 + i] for i in range(2))
    assert of_states - of_attention == pytest.approx(tokens * (15 * 1024 - lse), rel=1e-3)
    one, many = (
        planned(checkpointing="full", seq_len=n).step.memory.total for n in (1 << 17, 1 << 18)
    )
    assert one < many


def planned_in_chunks(ranks=2, seq_len=1 << 20, chunk=1 << 17, model="minicpm-sala", **more):
    options = {"model": model, "seq_len": seq_len, "sp_size": ranks, "dtype": "bf16"}
    options |= {"batch_size": 1, "checkpointing": "full", "engine": "torch", "chunk": chunk}
    cluster = Cluster(ranks, 139.8, H200, host_gib=128.0)
    return plan(TrainConfig(**options | more), cluster, "torch")


def test_plans_of_chunks_have_the_keys_of_eight_layers_and_states_of_the_others():
    run = planned_in_chunks()
    keys = 8 * 2 * 2 * 128 * (2 + 4)  # layers, k and v, kv heads, size, bf16 and fp32: 24 KiB
    choices = 8 * 2 * 64 * 2  # of all tokens but the first 6,208, which see all blocks
    first = PRESETS["minicpm-sala"].sparse.exact_tokens
    state, parts = 32 * 128 * 128 * 4, run.step.memory.parts
    tokens = 1 << 19
    assert parts["kept keys"] == keys * tokens + choices * (tokens - first // 2)
    assert parts["kept states"] == 24 * (8 + 2) * state
    longer = planned_in_chunks(seq_len=1 << 21).step.memory
    grown = tokens * (keys + choices + 24 * state / (1 << 16))
    assert grown <= longer.total - run.step.memory.total <= 1.05 * grown
    assert possible_chunks(planned_in_chunks(chunk=None)) == [2 * n for n in CHUNKS]
    groups = planned_in_chunks(checkpointing_every=2).step
    assert groups.memory.parts["kept keys"] == parts["kept keys"], "groups of blocks of both kinds"
    counts = {
        r.run: n for r, n in run.step.attention.items() if isinstance(r.shape, LightningShape)
    }
    assert counts == {"forward": 24 * 8, "again": 24 * (8 + 7), "backward": 24 * 8}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_plans_have_the_states_that_ranks_exchange_in_a_chunk(ranks):
    shape = LightningShape(1, 1 << 16, 32, 128, torch.bfloat16, ranks, chunked=True)
    layout, edges = Layout.zigzag(1 << 16, ranks), Edges((True,), (True,))
    total = plan_states(layout, (0, 1 << 16), 0, edges=edges).total
    assert shape.exchanged_bytes == total * shape.state_bytes
    assert shape.memory.held == LANES["visit"] * total * shape.state_bytes


def test_plans_count_the_states_that_chunks_hold(monkeypatch):
    """The most at the end of a backward, in a layer of one of two ranks."""
    found, finish = [], StateMemory.finish

    def note(memory, number):
        past = memory.past
        states = [*memory.states, memory.gradient, past.initial, past.final, past.dfinal]
        held = {x.data_ptr(): x.nbytes for x in [*states, past.dinitial] if x is not None}
        found.append(sum(held.values()))
        finish(memory, number)

    monkeypatch.setattr(StateMemory, "finish", note)
    train_steps(SMALL, 2, 23, Saving("full"), steps=1)
    assert max(found) == 2 * LightningShape(1, 23, 4, 8, torch.float64).count_kept(4), "in fp64"


@pytest.mark.parametrize("mixer", ["lightning", "attention"])
@pytest.mark.parametrize(
    "saving",
    [
        Saving(),
        Saving(tile=64),
        Saving("selective"),
        Saving("selective", tile=64),
        Saving("full"),
        Saving("full", every=2),
        Saving("selective", every=2),
    ],
)
def test_plans_count_what_blocks_save(monkeypatch, saving, mixer):
    """In two blocks of sala-tiny. On CPUs, torch's norms save more than those of GPUs."""
    monkeypatch.setattr(RMSNorm, "forward", lambda m, x: _Norm.apply(x, m.weight, m.eps_of(x)))
    config = dataclasses.replace(PRESETS["sala-tiny"], num_layers=2, mixers=(mixer,) * 2)
    model, tokens, saved = CPM(config, saving=saving), 256, list[torch.Tensor]()
    x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
    tables = rope_tables(torch.arange(tokens), config.head_dim)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = saving.run_all(model.layers, x, *tables, find_part(model.sp), keep=tables)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    for other in (out, *tables, *model.parameters()):
        storages.pop(other.untyped_storage().data_ptr(), None)
    layers = saving.every or 1
    shape = Shape(config, torch.float32, layers=layers, saving=saving, mixers=(mixer,) * layers)
    assert sum(storages.values()) == 2 // layers * find_unit(shape, tokens).saved


def test_plans_count_what_the_lightning_kernel_allocates_and_moves(monkeypatch):
    """In a rank of two, whose two runs both take and leave a state."""
    shape = LightningShape(1, 1 << 17, 32, 128, torch.bfloat16, ranks=2)
    tokens, moved = shape.rank_tokens, list[int]()
    segments = Segments((0, tokens // 2, tokens), (0, 1), (0, 1))
    x = torch.empty(tokens, shape.heads, shape.head_size, dtype=shape.dtype, device=META)
    rates = ConstantRates((), torch.empty(shape.heads, device=META))
    initial = torch.empty(2, shape.heads, shape.head_size, shape.head_size, device=META)

    def launch(name, pieces, inputs, **constants):
        moved.append(sum(getattr(y, "shape", None) == x.shape for y in inputs))

    def work_of(run):
        """Return the bytes without results, and the tensors of x's size that launches take."""
        moved.clear()
        with Ledger() as ledger:
            ledger.ignore(x, rates.slopes, initial)
            results = run()
        tables = 1 << 14
        return (ledger.most - sum(y.nbytes for y in results)) // tables * tables, sum(moved)

    def forward():
        states = triton_kernel.forward_states(x, x, rates, segments)
        return [triton_kernel.outputs(x, x, x, rates, 1.0, segments, states, initial)]

    def backward():
        states = triton_kernel.backward_states(x, x, rates, 1.0, segments)
        final = torch.empty_like(states.last)
        return triton_kernel.gradients(x, x, x, x, rates, 1.0, segments, initial, states, final)

    programs = SimpleNamespace(chain_states=defaultdict(lambda: lambda *inputs, **constants: None))
    monkeypatch.setattr(triton_kernel, "_launch", launch)
    monkeypatch.setattr(triton_kernel, "_load_programs", lambda: programs)
    memory = shape.memory
    assert work_of(forward) == (memory.forward, _FORWARD_TENSORS)
    assert work_of(backward) == (memory.backward, _BACKWARD_TENSORS)


def test_a_folder_is_trained_exported_and_read_again(alone, tmp_path, capsys):
    """With the released fields and small sizes: a step in chunks on two ranks, and one more on one
    rank.
    """
    folder, data = tmp_path / "release", written_text(tmp_path / "text", ByteTokenizer())
    save_weights(folder, config_from_hf(sala.SMALL), initialized().float().state_dict())
    (folder / "config.json").write_text(json.dumps(sala.SMALL))
    ByteTokenizer().save(folder)
    options = {"init_from": str(folder), "data": str(data), "seq_len": 60, "batch_size": 2}
    options |= {"steps": 2, "micro_batch_size": 2, "output": str(tmp_path / "run")}
    first = {**options, "processes": 2, "sp_size": 2, "stop_after": 1, "chunk": 25}
    words = [w for n, v in first.items() for w in ("--" + n.replace("_", "-"), str(v))]
    ended, printed = run_script(2, "train/pretrain.py", *words)
    assert ended == 0, printed
    assert "lightning attention in 3 of 5 layers" in printed
    assert train(options, resume="auto", checkpointing="full")
    export_main(["--run", str(tmp_path / "run"), "--output", str(tmp_path / "exported")])
    assert "no modelling file is written" in capsys.readouterr().out
    written = read_folder(tmp_path / "exported")
    assert {n: written[n] for n in sala.SMALL.keys() - NO_MATTER} == {
        n: value for n, value in sala.SMALL.items() if n not in NO_MATTER
    }
    trained = load_model(tmp_path / "run")
    again = load_cpm(tmp_path / "exported")
    places = torch.arange(90)
    assert again(TOKENS, places).equal(trained(TOKENS, places))
    generate_main(["--init-from", str(tmp_path / "exported"), "--prompt", "def ", "--tokens", "4"])
    assert capsys.readouterr().out.startswith("def ")
