"""--fp8: what is refused, and products in float8, which CPUs emulate, against products in bf16."""

import pytest
import torch
from torch import nn

from models.blocks import Saving
from models.config import PRESETS, CPMConfig
from models.cpm import CPM
from tests.launcher import run_ranks, world_of_one
from train.engine import fp8
from train.engine.torch import TorchEngine
from train.run.distributed import choose_engine
from train.settings.config import TrainConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL = CPMConfig(64, 64, 128, 2, num_heads=4, num_kv_heads=1, head_dim=16)
# e4m3 has 3 bits behind the point, so it rounds by at most 2^-4 of a number. Both inputs of a
# product are rounded: (1 + 2^-4)^2 - 1.
ROUNDING = 0.13
# Below 2^-6 e4m3 rounds by at most 2^-10, and scales put the largest number between 224 and 448.
SMALLEST = 2**-10 / 224


@pytest.mark.parametrize(
    "options, message",
    [
        ({"engine": "bmtrain"}, "--fp8 needs --engine torch, got --engine bmtrain"),
        ({"dtype": "fp16"}, "--fp8 needs --dtype bf16, got --dtype fp16"),
        ({"sp_size": 2, "seq_len": 4080}, "needs --seq-len as a multiple of 32, got 4080"),
        ({"mlp_tile": 1000}, "needs --mlp-tile as a multiple of 16, got 1000"),
        ({"model": "cpm-bee-10b"}, "--fp8 does not go with --model cpm-bee-10b, a cpm-bee"),
        ({"model": "minicpm4-0.5b"}, "minicpm4-0.5b: none of its linear layers is large enough"),
    ],
)
def test_options_that_exclude_it_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(
            **{"model": "minicpm4-8b", "dtype": "bf16", "fp8": True} | options
        ).model_config()


def test_machines_that_lack_it_are_refused(monkeypatch):
    config = TrainConfig(dtype="bf16", fp8=True)
    with pytest.raises(ValueError, match=r"--fp8 needs a GPU .* leave it out to train on CPUs"):
        choose_engine(config, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"8\.9 or newer, such as H100 or H200; A100 has 8\.0"):
        choose_engine(config, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("bmt_burst.kernels.installed", lambda module: module == "bmtrain")
    with pytest.raises(ValueError, match=r"--fp8 needs the package torchao: pip install .*\[fp8\]"):
        choose_engine(config, GPU)
    monkeypatch.setattr("bmt_burst.kernels.installed", lambda module: True)
    assert choose_engine(config, GPU) == "torch"
    assert choose_engine(TrainConfig(), GPU) == "bmtrain"


def test_large_layers_are_converted():
    pytest.importorskip("torchao")
    with torch.device("meta"):
        model = CPM(PRESETS["minicpm4-8b"])
    names = set(model.state_dict())
    assert fp8.convert(model) == (
        "fp8: q_proj, o_proj, gate_proj, up_proj, down_proj multiply in float8; layers that would "
        "not gain from it, embeddings and head in bf16; the first step compiles"
    )
    assert type(model.lm_head) is nn.Linear
    assert set(model.state_dict()) == names
    with torch.device("meta"):
        hybrid = CPM(PRESETS["minicpm-sala"])
    assert "k_proj, v_proj" in fp8.convert(hybrid).split(" multiply ")[0]


def converted(backend: str, saving: Saving) -> CPM:
    model = CPM(SMALL, saving=saving)
    fp8.convert(model, emulate=True, backend=backend)
    return model


def test_a_product_is_as_near_as_its_rounding_allows(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8, "pays", lambda *shape: True)
    layer = converted("eager", Saving()).layers[0].mlp.up_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator).requires_grad_()
    dout = torch.randn(32, 128, generator=generator)
    layer(x).backward(dout)
    w = layer.weight.detach()
    for found, a, b in ((layer(x), x, w.T), (x.grad, dout, w), (layer.weight.grad, dout.T, x)):
        exact, a, b = a @ b, a.abs(), b.abs()
        # a number below the smallest is off by a part of its row's or column's largest
        floor = SMALLEST * (a.amax(1, True) * b.sum(0) + a.sum(1, True) * b.amax(0))
        error = (found - exact).abs()
        assert (error <= ROUNDING * (a @ b) + floor).all()
        assert (error > 2**-9 * exact.abs()).any()  # more than bf16 would round


def train(
    rank: int, size: int, saving: Saving, float8: bool = True, compiled: bool = False
) -> list[float]:
    """Return loss and gradient norm of three steps of two rows, which the ranks share."""
    fp8.pays = lambda *shape: shape[0] > 16  # k_proj and v_proj stay
    build = (lambda: converted("aot_eager", saving)) if float8 else (lambda: CPM(SMALL))
    engine = TorchEngine(build, device=CPU, dtype=torch.bfloat16)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    mine, numbers = tokens[rank::size], list[float]()
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        for _ in range(3):
            loss, _ = engine.model(mine, torch.arange(32), mine.roll(-1, 1))
            engine.backward(loss / tokens.numel())
            numbers += engine.sum([float(loss.detach()) / tokens.numel()])
            numbers.append(engine.step(1e-3, 1.0))
    return numbers


@pytest.fixture
def convertible(monkeypatch):
    """Restore the layers that are large enough, after `train`."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8, "pays", fp8.pays)


def test_training_is_near_bf16_and_equal_on_two_ranks(convertible):
    with world_of_one():
        plain, one = train(0, 1, Saving(), float8=False), train(0, 1, Saving())
    assert one == pytest.approx(plain, rel=ROUNDING)
    assert one != pytest.approx(plain, rel=2**-16)
    # two ranks round each row's gradients to bf16 before they add them
    assert run_ranks(2, train, 2, Saving())[0] == pytest.approx(one, rel=2**-7)


@pytest.mark.parametrize(
    "saving", [Saving("selective"), Saving("full", tile=16)], ids=["selective", "full-tile"]
)
def test_all_blocks_and_steps_share_what_is_compiled(saving, convertible):
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    with world_of_one():
        # compiled parts round fewer intermediate results to bf16
        eager = pytest.approx(train(0, 1, saving), rel=2**-7)
        assert train(0, 1, saving, compiled=True) == eager
    # a tiled part also runs without gradients
    assert stats["unique_graphs"] - before == 2 + (saving.tile is not None)
