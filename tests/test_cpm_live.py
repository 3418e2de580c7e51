"""CPM-Bee and CPM-Ant against the golden values of CPM-Live's own code, on one rank and on
several.
"""

import dataclasses
import json
import math

import pytest
import torch

import bmt_burst.bias.areas
from bmt_burst import Layout, Mask
from models import cpm_bee
from models.blocks import Saving
from models.cpm_ant import AntConfig, CPMAnt, ant_scores
from models.cpm_bee import BeeConfig, CPMBee, bee_scores
from models.cpm_live.config import PRESETS
from tests.largest import Largest
from tests.live import Golden, golden, shard_rows, unshard_rows
from tests.reference import relative_error
from tests.rings import on_ranks
from train.loop.measure import step_flops

BOTH = pytest.mark.parametrize("name", ["bee", "ant"])
RUNS = [
    (4, "striped", "ring", Saving("selective")),
    (4, "balanced", "ring", Saving("full", every=2, tile=7)),
    (2, "contiguous", "ulysses", Saving("full", blocks=1)),
]
ALONE = [Layout.zigzag(96, 1)] * 2
# fp32 rounds to 6e-8. The golden values come from a few hundred operations in another order, and
# are 1.6e-6 off what fp64 gives. A residual divisor of 1 instead of 1.05 moves logits by 7e-2.
FP32 = 1e-5


def errors(model, case: Golden) -> dict[str, float]:
    """Return the errors of a model's gradients, relative to the file's."""
    return {
        name: relative_error(case.projected(p.grad.cpu()), case.tensors[f"grad.{name}"])
        for name, p in model.named_parameters()
    }


@BOTH
def test_scores_are_cpm_lives(name):
    """Visible pairs, and their rows of the bias table. Padding sees nothing."""
    case = golden(name)
    for row, scores in enumerate(case.scores()):
        visible = case.tensors["mid.attention_mask"][row]
        buckets = case.tensors["mid.bucket"][row].long()
        assert scores.mask.dense().equal(visible)
        assert scores.dense()[visible].equal(buckets[visible])
        assert not visible[case.input["length"][row] :].any()
        # segments, spans and samples start runs, too
        runs = int((case.input["context"][row].diff() != 0).sum()) + 4
        assert len(scores.mask.slices) < runs**2 / 2


@BOTH
def test_embeddings_and_hidden_states_are_cpm_lives(name):
    """The logits are hidden @ words.T / sqrt(E). There are more words than hidden features, so the
    logits determine the hidden states.
    """
    case = golden(name)
    model = case.model()
    words = case.tensors["param.input_embedding.weight"].double()
    logits = case.tensors["logits_f64"][..., : len(words)].double()
    expected = {
        "embed": case.tensors["mid.embed"],
        "hidden": math.sqrt(words.shape[1]) * logits @ words.pinverse().T,
    }
    seen = {"embed": [], "hidden": []}
    model.encoder.layers.register_forward_pre_hook(
        lambda _module, args: seen["embed"].append(args[0])
    )
    model.encoder.register_forward_hook(lambda _module, _args, out: seen["hidden"].append(out))
    model(*case.arguments(ALONE, 0), case.scores())
    for stage, [found] in seen.items():
        assert relative_error(found, expected[stage]) < FP32, stage


@BOTH
@pytest.mark.parametrize(("size", "layout", "strategy", "saving"), RUNS)
def test_several_ranks_equal_cpm_live(name, size, layout, strategy, saving):
    """Logits, the loss, and the sum of the ranks' gradients, also where blocks are recomputed."""
    case = golden(name)
    layouts = case.layouts(layout, size)
    count = int((case.input["target"] >= 0).sum())

    def work(sp):
        model = case.model(sp=sp, strategy=strategy, saving=saving)
        arguments, scores = case.arguments(layouts, sp.rank), case.scores()
        logits = model(*arguments, scores, layout=layouts).detach()
        labels = shard_rows(case.input["target"], layouts, sp.rank)
        loss, mine = model(*arguments, scores, labels, layouts)
        (loss / count).backward()
        return logits, loss.detach(), mine, {name: p.grad for name, p in model.named_parameters()}

    logits, losses, counts, grads = zip(*on_ranks(size, work), strict=True)
    assert relative_error(unshard_rows(logits, layouts), case.tensors["logits_f64"]) < FP32
    assert sum(counts) == count
    assert abs(sum(losses) / count - case.tensors["loss"]) < 5e-6
    for parameter, expected in case.all("grad").items():
        found = case.projected(sum(g[parameter] for g in grads))
        assert relative_error(found, expected) < FP32, parameter


@BOTH
def test_areas_of_one_row_are_computed_without_the_table(name, monkeypatch):
    """Segments of 4 tokens count as long here, so most pairs are in kernel calls without a bias."""
    monkeypatch.setattr(bmt_burst.bias.areas, "_LONG", 4)
    case = golden(name)
    assert all(any(term.row is not None for term in scores.terms) for scores in case.scores())
    test_several_ranks_equal_cpm_live(name, 2, "zigzag", "ring", Saving())


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
PRECISIONS = [  # bounds of logits, gradients and the loss
    # its norms' statistics, its rotation and the file's gradients are fp32
    ("cpu", torch.float64, 1e-6, FP32, 1e-6),
    ("cpu", torch.float32, FP32, FP32, 5e-6),
    # twice what CPM-Live itself is off in these dtypes
    ("cpu", torch.float16, 5e-3, 1e-2, 1e-3),
    ("cpu", torch.bfloat16, 3e-2, 6e-2, 1e-2),
]
PRECISIONS += [
    pytest.param("cuda", *bounds, 1e-2, marks=[pytest.mark.gpu, CUDA])
    for _, *bounds, _ in PRECISIONS[1:]
]


@BOTH
@pytest.mark.parametrize(("device", "dtype", "logits", "grads", "loss"), PRECISIONS)
def test_one_rank_equals_cpm_live(name, device, dtype, logits, grads, loss):
    case = golden(name)
    model = case.model(dtype).to(device)
    arguments = *(x.to(device) for x in case.arguments(ALONE, 0)), case.scores()
    found = model(*arguments)
    assert found.dtype == dtype
    assert relative_error(found.cpu(), case.tensors["logits_f64"]) < logits
    total, count = model(*arguments, case.input["target"].to(device))
    (total / count).backward()
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = case.tensors["loss_f64" if dtype == torch.float64 else "loss"]
    assert abs((total / count).detach().cpu() - expected) < loss
    assert max(errors(model, case).values()) < grads


def test_ants_released_weights_want_residuals_that_are_not_divided():
    case = golden("ant")
    config = dataclasses.replace(case.config, residual_divisor=1.0)
    model = case.model(config=config)
    logits = model(*case.arguments(ALONE, 0), case.scores())
    assert relative_error(logits, case.tensors["released.logits"]) < FP32
    loss, count = model(*case.arguments(ALONE, 0), case.scores(), case.input["target"])
    assert abs(loss.detach() / count - case.tensors["released.loss"]) < 5e-6
    assert PRESETS["cpm-ant-10b"].residual_divisor == 1.0
    assert PRESETS["cpm-bee-10b"].residual_divisor == 1.05


def test_a_rotation_in_fp16_is_that_of_cpm_lives_fp16_weights():
    case = golden("bee")
    assert int(case.input["input_sub"].max()) > 0
    model = case.model(torch.float16, dataclasses.replace(case.config, fp16_rotary=True))
    words = model.input_embedding.weight
    found = model.embed(case.input["input"], case.input["input_sub"], words)
    expected = case.tensors["mid.embed_f16"]
    unit = 2.0 ** (expected.abs().max().log2().floor() - 10)  # of the last place of the largest
    assert (found - expected).abs().max() <= unit


def test_sub_ids_that_fp16_does_not_hold_are_refused():
    """The largest that it holds has a rotation. Larger ones would be NaN. Exact rotations hold
    any.
    """
    case = golden("bee")
    tokens, subs, ext_tokens, ext_subs = case.arguments(ALONE, 0)
    scores = case.scores()
    exact, rounded = (
        case.model(config=dataclasses.replace(case.config, fp16_rotary=in_fp16))
        for in_fp16 in (False, True)
    )
    assert exact(tokens, subs + 4095, ext_tokens, ext_subs + 4095, scores).isfinite().all()
    assert rounded(tokens, subs, ext_tokens, ext_subs.clamp(min=4094), scores).isfinite().all()
    refused = "fp16_rotary holds sub-ids below 4095, got 4095: train with fp16_rotary"
    for wrong in ((subs, ext_subs.clamp(min=4095)), (subs.clamp(min=4095), ext_subs)):
        with pytest.raises(ValueError, match=refused):
            rounded(tokens, wrong[0], ext_tokens, wrong[1], scores)


def test_rotations_need_little_memory(monkeypatch):
    """Angles are fp64, and computed for a few tokens at a time. Results are the same bits."""
    found, most = {}, {}
    for at_once in (10**6, 8):
        monkeypatch.setattr(cpm_bee, "_ROTATED_AT_ONCE", at_once)
        model, case = golden("bee").model(), golden("bee")
        with Largest(torch.float64) as largest:
            words = model.input_embedding.weight
            turned = model.embed(case.input["input"], case.input["input_sub"], words)
            turned.square().sum().backward()
        found[at_once] = [turned.detach(), words.grad]
        most[at_once] = largest.entries
    assert all(a.equal(b) for a, b in zip(*found.values(), strict=True))
    assert most == {10**6: 2 * 96 * 32, 8: 8 * 32}


@pytest.mark.parametrize(("preset", "billions"), [("cpm-bee-10b", 9.62), ("cpm-ant-10b", 9.39)])
def test_presets_have_their_size(preset, billions):
    config = PRESETS[preset]
    with torch.device("meta"):
        model = (CPMBee if isinstance(config, BeeConfig) else CPMAnt)(config)
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == config.num_parameters
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=6e-3)
    looked_up = (
        "position_bias.relative_attention_bias",
        "prompt_embedding.weight",
        "segment_embedding.weight",
    )
    multiplied = [
        p.numel() for key, p in parameters.items() if p.dim() > 1 and key not in looked_up
    ]
    assert step_flops(config, 7, 0) == 6 * 7 * sum(multiplied)
    assert step_flops(config, 0, 10) == 120 * config.num_heads * config.dim_head


@BOTH
def test_parts_that_are_left_out_do_nothing_and_have_no_weights(name):
    """The same as a whole model in which they give 0 and no residual is divided."""
    case = golden(name)
    config = dataclasses.replace(
        case.config, mask_modules=[[True, False], [False, True]], residual_divisor=1.0
    )
    assert type(config).from_dict(config.to_dict()) == config
    whole = case.model(config=dataclasses.replace(config, mask_modules=None))
    with torch.no_grad():
        whole.encoder.layers[0].self_att.self_attention.attention_out.weight.zero_()
        whole.encoder.layers[1].ffn.ffn.w_out.weight.zero_()
    model = (CPMBee if name == "bee" else CPMAnt)(config)
    left = model.state_dict().keys()
    without = "encoder.layers.0.self_att", "encoder.layers.1.ffn"
    assert not any(key.startswith(without) for key in left)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    model.load_state_dict({key: x for key, x in whole.state_dict().items() if key in left})
    arguments = *case.arguments(ALONE, 0), case.scores()
    assert relative_error(model(*arguments), whole(*arguments)) < 1e-6
    assert config.num_attentions == 1


def test_starting_weights_are_cpm_lives():
    config = PRESETS["cpm-ant-tiny"]
    model, generator = CPMAnt(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            model.init_parameter(key, parameter, generator)
            deviation = 0.02 if key.endswith("embedding.weight") else 1.0
            if parameter.dim() == 1:
                assert parameter.eq(1).all()
            else:
                assert float(parameter.std()) == pytest.approx(deviation, rel=0.05), key


CPM_LIVES = {
    "vocab_size": 120,
    "dim_model": 64,
    "num_heads": 4,
    "dim_head": 16,
    "dim_ff": 128,
    "num_layers": 2,
    "dropout_p": 0.0,
    "eps": 1e-06,
    "half": True,
    "mask_modules": None,
    "position_bias_num_buckets": 32,
    "position_bias_max_distance": 64,
}


def test_cpm_lives_json_is_read():
    bee = BeeConfig.from_dict(CPM_LIVES | {"position_bias_num_segment_buckets": 33})
    assert (bee.num_bias_rows, bee.residual_divisor, bee.dim_ff) == (65, 1.05, 128)
    ant = AntConfig.from_dict(CPM_LIVES | {"segment_types": 5, "something": "else"})
    assert (ant.num_bias_rows, ant.prompt_types, ant.residual_divisor) == (32 + 25, 32, 1.0)
    assert (BeeConfig().num_heads, BeeConfig().position_bias_num_buckets) == (64, 256)
    assert AntConfig().position_bias_num_buckets == 512
    rotate = [PRESETS[f"cpm-bee-{size}"].fp16_rotary for size in ("tiny", "3b", "10b")]
    assert rotate == [False, True, True]
    for change, expected in (({}, True), ({"half": False}, False), ({"fp16_rotary": False}, False)):
        assert BeeConfig.from_dict(CPM_LIVES | change).fp16_rotary == expected
    for config in PRESETS.values():
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


WRONG_CONFIGS = [
    ({"something": 1}, r"unknown fields \['something'\] in a configuration of cpm-bee"),
    ({"model_type": "cpm-ant"}, "expected a configuration of 'cpm-bee', got one of 'cpm-ant'"),
    ({"dropout_p": 0.1}, "dropout_p must be 0"),
    ({"dim_model": 63}, "dim_model must be even"),
    ({"num_layers": "2"}, "num_layers must be int"),
    ({"position_bias_num_buckets": 3}, "at least 4"),
    ({"position_bias_max_distance": 8}, "more than the 8 distances"),
    ({"mask_modules": 5}, "for each of 2 layers, got 5"),
    ({"mask_modules": [[0, 2], [0, 0]]}, "mask_modules must be"),
    ({"dim_ff": 10**14}, "less than 1e15 parameters, got"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CONFIGS)
def test_wrong_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        BeeConfig.from_dict(CPM_LIVES | change)


def bee_row(tokens: int) -> dict[str, torch.Tensor]:
    """Return a row of one span with one segment, all context."""
    nothing = torch.zeros(tokens, dtype=torch.int32)
    return {
        "length": tokens,
        "context": nothing == 0,
        "sample_ids": nothing,
        "num_segments": nothing + 1,
        "segment": nothing,
        "segment_rel_offset": nothing,
        "segment_rel": nothing[:1],
        "span": nothing,
    }


ONES = torch.ones(8, dtype=torch.int32)
WRONG_ROWS = [
    ({"length": 9}, "length must be at most the 8 tokens of the row, got 9"),
    ({"span": torch.zeros(7)}, r"span must be one number .* \(8,\) on the CPU, got \(7,\)"),
    ({"context": torch.ones(8)}, "context must be bool, got torch.float32"),
    ({"segment": ONES}, "segment must be at least 0 and below 1, got 1 at 0"),
    ({"segment_rel": ONES[:1] * 77}, "segment_rel must be at least 0 and below 33, got 77"),
    ({"segment_rel_offset": ONES * 3}, "pairs must have entries 3 to 3, .*, got 1 entries"),
    ({"sample_ids": -ONES}, "sample_ids must be at least 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ROWS)
def test_wrong_rows_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        bee_scores(golden("bee").config, **{**bee_row(8), **change})


def test_a_row_of_padding_alone_sees_nothing_and_a_row_needs_scores():
    case = golden("bee")
    empty = bee_scores(case.config, **{**bee_row(8), "length": torch.tensor(0)})
    assert empty.mask == Mask(8, ())
    with pytest.raises(ValueError, match="expected either scores, or rows"):
        case.model()(*case.arguments(ALONE, 0))


def test_a_row_of_many_short_runs_is_refused_at_once():
    context, nothing = torch.arange(4096) % 2 == 1, torch.zeros(4096, dtype=torch.int32)
    message = "2048 runs of tokens to be predicted, up to 2048 in a span"
    with pytest.raises(ValueError, match=message):
        ant_scores(golden("ant").config, 4096, context, nothing, nothing)


def test_samples_of_a_bee_see_themselves_and_the_main_one_sees_all():
    """Also where samples next to the main one have tokens to be predicted."""
    sample = torch.tensor([0] * 6 + [1] * 4 + [2] * 2)
    context = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    scores = bee_scores(
        golden("bee").config, **{**bee_row(12), "sample_ids": sample, "context": context}
    )
    q, k = torch.arange(12).unsqueeze(1), torch.arange(12)
    order = context | (~context.unsqueeze(1) & (k <= q))
    expected = order & ((sample.unsqueeze(1) == 0) | (sample.unsqueeze(1) == sample))
    assert scores.mask.dense().equal(expected)
