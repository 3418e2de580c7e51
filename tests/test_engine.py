"""The torch engine against plain torch: one process, AdamW and clipping written with torch's own
pieces.
"""

import math

import pytest
import torch
import torch.distributed as dist

from bmt_burst import SequenceParallel
from models.blocks import Saving
from models.cpm import CPM
from models.cpm_ant import CPMAnt
from models.cpm_bee import CPMBee
from tests.launcher import run_ranks, world_of_one
from tests.live import golden, shard_rows
from tests.test_checkpoint import write
from tests.test_model import SMALL, initialized
from train.checkpoints import checkpoint
from train.engine.common import AdamW, square_sum
from train.engine.torch import TorchEngine

ADAMW = AdamW(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3)
CPU = torch.device("cpu")


def steps(rank: int) -> tuple[dict, list]:
    """Return weights and norms after three steps. Each rank has a different share of the loss."""
    engine = TorchEngine(lambda: CPM(SMALL), device=CPU, adamw=ADAMW)
    engine.load(
        lambda key, shard: whole(key).flatten()[shard.start : shard.start + len(shard.flat)],
        optimizer_steps=0,
    )
    norms = []
    for step, max_norm in enumerate((1e9, 0.01, 1.0)):
        share = (rank + 1) / sum(range(1, engine.world_size + 1))
        tokens, positions, labels = batch(step)
        for row in range(2):
            loss, count = engine.model(tokens[row : row + 1], positions, labels[row : row + 1])
            engine.backward(loss / (2 * count) * share, is_last=row == 1)
        with torch.no_grad():
            engine.model(tokens, positions)  # leaves weights gathered
        norms.append(engine.step(0.01 * (step + 1), max_norm))
    return {key: (shard.start, shard.flat) for key, shard in engine.state().items()}, norms


def whole(key: str) -> torch.Tensor:
    kind, name = key.split("/")
    weight = initialized(SMALL).get_parameter(name).detach()
    return weight if kind == "weight" else torch.zeros_like(weight)


def batch(step: int):
    tokens = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(step))
    return tokens, torch.arange(17), tokens.roll(-1, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_engine_equals_torch(size):
    model = initialized(SMALL)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    expected_norms = []
    for step, max_norm in enumerate((1e9, 0.01, 1.0)):
        loss, count = model(*batch(step))
        optimizer.zero_grad()
        (loss / count).backward()
        expected_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
    results = run_ranks(size, steps)
    for _, norms in results:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, parameter in model.named_parameters():
        for kind, value in (
            ("weight", parameter),
            *((k, optimizer.state[parameter][k]) for k in ("exp_avg", "exp_avg_sq")),
        ):
            shards = sorted(
                (state[f"{kind}/{name}"] for state, _ in results), key=lambda entry: entry[0]
            )
            got = torch.cat([flat for _, flat in shards])
            assert torch.allclose(got, value.detach().flatten(), rtol=1e-4, atol=1e-7), (kind, name)


def saving_norms(rank: int, savings: list[Saving], keeps: bool = False) -> list[list[float]]:
    """Losses and gradient norms of two steps on a sequence that all ranks share, for each. Between
    them is an evaluation. `keeps` is the engine's keeps_weights.
    """
    sp = SequenceParallel(rank, dist.get_world_size(), process_group=dist.group.WORLD)
    tokens = batch(0)[0][:1]
    part = sp.shard(tokens), sp.positions(17), sp.shard(tokens.roll(-1, 1))
    found = []
    for saving in savings:
        engine = TorchEngine(
            lambda saving=saving: CPM(SMALL, sp, saving), device=CPU, seed=1, keeps_weights=keeps
        )
        steps = []
        for _ in range(2):
            loss, _ = engine.model(*part)
            engine.backward(loss / 17)
            steps += [engine.sum([float(loss.detach())])[0], engine.step(0.01, 1.0)]
            with torch.no_grad():
                steps += engine.sum([float(engine.model(*part)[0])])
        found.append(steps)
    return found


def test_blocks_that_are_computed_again_are_gathered_again():
    """Alone, in groups, and tile by tile, all bit for bit."""
    plain = [Saving(), Saving("full"), Saving("selective", every=2)]
    tiled = [Saving(tile=3), Saving("full", every=2, tile=3)]
    for found in run_ranks(2, saving_norms, [*plain, *tiled]):
        assert found[:3] == [found[0]] * 3
        assert found[3:] == [found[3]] * 2
        assert found[3] == pytest.approx(found[0], rel=1e-6)
    gathered_once = run_ranks(2, saving_norms, plain[:2], True)
    assert gathered_once == [found[:1] * 2] * 2


@pytest.mark.parametrize("keeps", [False, True])
def test_weights_that_are_loaded_replace_gathered_ones(keeps):
    """An evaluation gathers weights, and no backward frees them."""
    with world_of_one(), torch.no_grad():
        engine = TorchEngine(lambda: CPM(SMALL), device=CPU, keeps_weights=keeps)
        tokens, positions = batch(0)[0][:1], torch.arange(17)
        assert engine.model(tokens, positions).any()
        engine.load(lambda _, shard: torch.zeros_like(shard.flat), optimizer_steps=0)
        assert not engine.model(tokens, positions).any()


def shortened(name: str, tokens: int) -> dict[str, torch.Tensor]:
    """Return the golden rows with padding after some tokens, which sees nothing. Its targets
    stay.
    """
    fields = golden(name).input
    return fields | {"length": fields["length"].clamp(max=tokens)}


def shortened_norm(rank: int, name: str, tokens: int) -> float:
    """The norm of the gradients, where each of two ranks has a half of the rows."""
    case, fields = golden(name), shortened(name, tokens)
    sp = SequenceParallel(rank, 2, process_group=dist.group.WORLD)
    engine = TorchEngine(lambda: (CPMBee if name == "bee" else CPMAnt)(case.config, sp), device=CPU)
    weights = {f"weight/{key}": x.flatten() for key, x in case.all("param").items()}
    moments = torch.zeros(10**5)
    engine.load(
        lambda key, s: weights.get(key, moments)[s.start : s.start + len(s.flat)], optimizer_steps=0
    )
    layouts = case.layouts("contiguous", 2)
    labels = shard_rows(fields["target"], layouts, rank)
    loss, _ = engine.model(
        *case.arguments(layouts, rank, fields), case.scores(fields), labels, layouts
    )
    engine.backward(loss)
    return engine.step(0.1, 1.0)


@pytest.mark.parametrize(("name", "tokens"), [("bee", 40), ("ant", 0)])
def test_ranks_whose_tokens_see_nothing_have_gradients(name, tokens):
    """The second rank's tokens, or all, see nothing. No parameter's gradient is missing, and those
    of projections and of the bias's table are 0.
    """
    case, fields, model = golden(name), shortened(name, tokens), golden(name).model()
    loss, _ = model(
        *case.arguments(case.layouts("zigzag", 1), 0, fields), case.scores(fields), fields["target"]
    )
    loss.backward()
    table = model.position_bias.relative_attention_bias.grad
    assert bool(table.any()) == (tokens > 0)
    expected = math.sqrt(square_sum([p.grad for p in model.parameters()]))
    assert run_ranks(2, shortened_norm, name, tokens) == [pytest.approx(expected, rel=1e-5)] * 2


def test_checkpoints_keep_the_random_state(tmp_path, alone):
    torch.manual_seed(5)
    path = write(tmp_path, {"step": 1}, {})
    expected = torch.rand(3)
    checkpoint.Checkpoint(path).restore_rng(0)
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("value", [1e-3, 1e30])
def test_the_gradient_norm_does_not_depend_on_how_gradients_are_cut(value):
    """Where a sum in fp32 is off by a tenth of a percent and more, or overflows."""
    grad = torch.full((20_000_000,), value)
    expected = math.sqrt(grad.numel()) * float(grad[0].double())
    for pieces in (1, 2, 7):
        norm = math.sqrt(sum(square_sum([piece]) for piece in grad.chunk(pieces)))
        assert norm == pytest.approx(expected, rel=1e-12)
