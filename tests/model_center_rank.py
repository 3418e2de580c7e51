"""One of BMTrain's ranks with models of ModelCenter: torchrun tests/model_center_rank.py FOLDER
TASKS

TASKS is JSON: the functions below to call, with their arguments. They check what they compute. On
GPUs BMTrain runs as it is, elsewhere see fake_cuda.py.
"""

import copy
import importlib.util
import itertools
import json
import math
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bmt_burst import Layout, Mask, SequenceParallel, init_sequence_parallel, shift_labels
from bmt_burst.bias import areas
from bmt_burst.loss import cross_entropy_sum, linear_cross_entropy_sum
from models.huggingface import load_cpm
from tests.fake_cuda import run_example
from tests.largest import Largest
from tests.reference import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 37
DOCUMENTS = (0, 5, 6, 37)
PROMPT = 8
SIZES = {"dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 48, "num_layers": 2}
SIZES["vocab_size"] = 97
# What differs from each model's defaults, some of them unlike any pretrained model.
CONFIGS = {
    "Llama": {},
    "Llama tied": {"tied": True, "attn_scale": False, "length_scale": True, "att_bias": True},
    "Llama labels": {"cls_head": 5, "norm_bias": True, "ffn_bias": True, "post_layer_norm": True},
    "Llama nothing": {"pos_bias_type": "none"},
    "GPT2": {"position_size": 40},
    "GPTj": {"pos_rotary_dim": 4},
    "GPTj whole": {"pos_rotary_dim": 64, "tied": True},
    "OPT": {"position_size": 40, "dropout_p": 0.0},
    "Bert": {"position_size": 40},
    "Roberta": {"position_size": 40},
    "CPM1": {"position_bias_num_buckets": 12, "position_bias_max_distance": 9},
    "CPM1 tied": {"tied": True, "attn_scale": True, "position_bias_max_distance": 100},
    "CPM3": {
        "position_bias_num_buckets": 20,
        "position_bias_max_distance": 19,
        "prompt_types": 3,
        "prompt_length": PROMPT,
    },
    "CPM3 segments": {
        "absolute_inner_segment": False,
        "segment_types": 5,
        "prompt_types": 24,
        "prompt_length": 1,
    },
}
# The calls of a model's further configurations; its first one has all. Without segments the last of
# these adds the same to all scores, which has no gradient but for rounding.
CALLS = {name: ("documents of rows", "context") for name in CONFIGS if " " in name}
CALLS["CPM3 segments"] = ("segments",)


# Models whose saved weights are read, with their settings.
TIED = {"attn_scale": True, "length_scale": False, "tied": True, "att_bias": True, "ffn_bias": True}
WRITTEN = {"Llama": {"norm_eps": 1e-5}, "Llama tied": TIED}

KNOWN = "expected one of ModelCenter's Llama, GPTj, GPT2, OPT, Bert, Roberta, CPM1, CPM3, got a"


def build(name: str, dtype: torch.dtype, **changes):
    """A model with random weights, alike on all ranks, none of which is 0 or 1."""
    import bmtrain
    import model_center.model as zoo

    kind = name.split()[0]
    config = getattr(zoo, f"{kind}Config")(
        **(SIZES | CONFIGS[name] | changes), half=dtype == torch.half
    )
    config.dtype = dtype
    torch.manual_seed(0)
    model = getattr(zoo, kind)(config)
    bmtrain.init_parameters(model)
    generator = torch.Generator(DEVICE).manual_seed(bmtrain.rank())
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.data.shape, device=DEVICE, generator=generator)
            p.data.add_(noise.to(dtype), alpha=0.05)
    return model


def random_tensors(name: str, batch: int) -> dict[str, torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(1), (batch, TOKENS)
    found = {
        "tokens": torch.randint(0, SIZES["vocab_size"], shape, generator=generator),
        "labels": torch.randint(
            0, CONFIGS[name].get("cls_head", SIZES["vocab_size"]), shape, generator=generator
        ),
        "weights": torch.randn(*shape, SIZES["dim_model"], generator=generator),
    }
    found["tokens"][:, :PROMPT] %= 24  # so many may be prompts, of CPM3
    return {key: x.to(DEVICE) for key, x in found.items()}


def total(model, tokens, labels, weights, embeds=False, **given) -> torch.Tensor:
    """A sum of losses, and of what the hidden states of all tokens are multiplied with, padding
    too.

    With `embeds` the weights are also what goes in, without a gradient.
    """
    inputs = {"inputs_embeds": weights.to(model.config.dtype)} if embeds else {"input_ids": tokens}
    with_logits = not hasattr(model, "lm_head")  # which is fp16 always
    out = model(**inputs, **given, output_logits=with_logits)
    found = (out.last_hidden_state.float() * weights).sum()
    return found + cross_entropy_sum(out.logits, labels)[0] if with_logits else found


def gradients(model) -> dict[str, torch.Tensor | None]:
    """This rank's part of each parameter's."""
    import bmtrain

    bmtrain.synchronize()
    return {
        name: None if p.grad is None else p.grad.flatten() for name, p in model.named_parameters()
    }


def worst_gradient(got: dict, expected: dict) -> tuple[float, str]:
    """Return the largest error of a parameter's gradient, of all ranks' parts together, and its
    name.

    A gradient below 1e-3 of all gradients is measured by that: a key's bias has one that is 0 but
    for rounding.
    """
    import bmtrain

    rows, nothing = [], torch.zeros(1, device=DEVICE)
    for name, exact in expected.items():
        mine, exact = ((nothing if x is None else x).double() for x in (got[name], exact))
        rows.append([float(x.square().sum()) for x in (mine - exact, exact)])
    rows = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    errors, sizes = bmtrain.distributed.all_reduce(rows, "sum").T
    found = (errors / sizes.clamp_min(1e-6 * float(sizes.sum()))).sqrt()
    worst = int(found.argmax())
    return float(found[worst]), list(expected)[worst]


def load(model, other, file: Path) -> None:
    """The weights of the other one, by way of a checkpoint."""
    import bmtrain

    bmtrain.save(other, str(file))
    if bmtrain.rank() == 0:
        # A buffer, which BMTrain 1.0.1 saves and fails to load, with any Llama; ModelCenter's
        # checkpoints have none.
        weights = {key: x for key, x in torch.load(file).items() if not key.endswith("inv_freq")}
        torch.save(weights, file)
    bmtrain.load(model, str(file), strict=False)


def calls(sp, name: str) -> dict[str, tuple[int, dict, dict]]:
    """Return by name the rows, and the arguments of a model as it is and on a rank of sp."""
    at = torch.arange(TOKENS, device=DEVICE)
    lengths, none = (
        torch.tensor(x, device=DEVICE) for x in ([TOKENS, 20, 0], [TOKENS, TOKENS, TOKENS])
    )
    padding = torch.stack((at >= 9, at >= 36, at % 7 != 3))
    causal = not name.startswith(("Bert", "Roberta"))
    mask = Mask.documents(DOCUMENTS, causal)
    bounds = (0, 6, TOKENS), (0, 20, TOKENS)
    rows = [Mask.documents(cuts, causal) for cuts in bounds]
    found = {
        "lengths": (3, {"length": lengths}, {"length": lengths}),
        "padding": (3, {"attention_mask": padding}, {"attention_mask": sp.shard(padding)}),
        "embeddings": (3, {"length": none, "embeds": True}, {"embeds": True}),
    }
    if name.startswith("CPM"):
        return found | biased_calls(sp, name, lengths)
    return found | {
        "documents": (
            1,
            {"documents": [DOCUMENTS]},
            {"mask": mask, "layout": Layout.balanced(mask, sp.size)},
        ),
        "documents of rows": (2, {"documents": bounds}, {"mask": rows, "layout": "striped"}),
    }


def biased_calls(sp, name: str, lengths: torch.Tensor) -> dict[str, tuple[int, dict, dict]]:
    """Those of models with learned biases, as `calls`."""

    def cut(whole):
        return {key: x if key == "length" else sp.shard(x, -1) for key, x in whole.items()}

    at = torch.arange(TOKENS, device=DEVICE)
    mask = Mask.documents(DOCUMENTS)
    starts = torch.tensor(DOCUMENTS, device=DEVICE)
    document = torch.bucketize(at, starts, right=True)
    whole = {
        "context": {
            "length": lengths,
            "context": torch.stack((at < 12, (at > 4) & (at < 22), at < 3)),
        },
        "context of spans": {
            "attention_mask": (at % 7 != 3).expand(1, TOKENS),
            "context": (at % 11 < 4).expand(1, TOKENS),
            "span": document.expand(1, TOKENS),
            "position_ids": at - starts[document - 1],
        },
    }
    if name.startswith("CPM3"):
        spans = whole["context of spans"]
        spans["position_ids"] = spans["position_ids"].expand(1, TOKENS)
        segments = torch.stack((at // 7 % 3, at // 20 + 1, 4 * at // TOKENS))
        whole["segments"] = {
            "length": lengths,
            "token_type_ids": segments,
            "position_ids": at.expand(3, TOKENS),
        }
        whole["segments"]["context"] = (at < 12).expand(3, TOKENS)
    rows = {"context of spans": 1}
    found = {key: (rows.get(key, 3), given, cut(given)) for key, given in whole.items()}
    given = {"length": lengths[:1], "span": document.expand(1, TOKENS)}
    return found | {
        "documents": (1, given, {"mask": mask, "layout": Layout.balanced(mask, sp.size)})
    }


def before(model, data: dict, documents: list | None = None, **given) -> torch.Tensor:
    """Of whole rows, or each document by itself."""
    if documents is None:
        return total(model, **data, **given)
    losses = []
    for row, bounds in enumerate(documents):
        for start, stop in itertools.pairwise(bounds):
            length = torch.tensor([stop - start], device=DEVICE)
            losses.append(
                total(
                    model,
                    **{k: x[row : row + 1, start:stop] for k, x in data.items()},
                    length=length,
                )
            )
    return sum(losses)


def after(model, sp, data: dict, **given) -> torch.Tensor:
    """Of this rank's part."""
    sp = sp.with_layout(given.get("layout", sp.layout))
    return total(model, **{name: sp.shard(x) for name, x in data.items()}, **given)


def equality(
    folder: Path, dtype: str, models: dict[str, list[str] | None], loss_bound: float, bound: float
) -> None:
    """Compare losses and each parameter's gradient of models as they are and over all ranks, up to
    relative errors. Print how many calls were compared, by default those of CALLS or all.
    """
    import bmtrain

    from bmt_burst.adapters import model_center

    areas._LONG = 6  # so that there are large areas of one row in short sequences
    sp, compared = init_sequence_parallel(), 0
    for name, chosen in models.items():
        alone = build(name, getattr(torch, dtype))
        enabled = model_center.enable(build(name, getattr(torch, dtype), emb_init_std=1.0), sp)
        load(enabled, alone, folder / "model.pt")
        keys = list(alone.state_dict()), list(enabled.state_dict())
        assert keys[0] == keys[1], name
        assert bmtrain.rank() or len(keys[0]) > 20, name  # others save nothing
        for call, (batch, whole, part) in calls(sp, name).items():
            if call not in (chosen or CALLS.get(name, [call])):
                continue
            data = random_tensors(name, batch)
            expected, got = before(alone, data, **whole), after(enabled, sp, data, **part)
            # BMTrain adds up gradients over ranks; in fp16 those of a mean would be too small.
            (expected / sp.size).backward()
            got.backward()
            with torch.no_grad():
                enabled.eval()
                evaluated = bmtrain.distributed.all_reduce(after(enabled, sp, data, **part), "sum")
                enabled.train()
            got = bmtrain.distributed.all_reduce(got.detach(), "sum")
            error, parameter = worst_gradient(gradients(enabled), gradients(alone))
            # A sum of some thousand numbers around 1.
            exact = float(expected.detach())
            close = pytest.approx(exact, rel=loss_bound, abs=10 * loss_bound)
            losses = float(got), float(evaluated)
            assert losses == (close, close), (name, call, losses, exact)
            assert error < bound, (name, call, parameter, error)
            compared += 1
            for model in (alone, enabled):
                for p in model.parameters():
                    p.grad = None
                for block in getattr(model, "decoder" if name == "OPT" else "encoder").layers:
                    for p in block._storage_params.values():
                        p.grad = None
    print(f"compared {compared} calls")


def check_errors(wrong: list[tuple[str, Callable]]) -> None:
    """Check how the error of each call begins, or that it has none where "" is expected."""
    for expected, call in wrong:
        error = ""
        try:
            call()
        except (TypeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        assert error.startswith(expected) if expected else not error, (expected, error)


def refused(folder: Path) -> None:
    """Check the errors of wrong calls, and that none of them changes a model."""
    from bmt_burst.adapters import model_center
    from bmt_burst.adapters.model_center import models

    sp = init_sequence_parallel()
    tokens = random_tensors("Llama", 2)["tokens"]
    part, llama = sp.shard(tokens), model_center.enable(build("Llama", torch.float32), sp)
    plain, of_layers = (build("Llama", torch.float32) for _ in range(2))
    kind, weights = type(plain), [p.data.clone() for p in plain.parameters()]
    length = torch.tensor([TOKENS, 9], device=DEVICE)
    check_errors(refused_models(sp, llama, plain, of_layers))
    check_errors(refused_arguments(sp, part, llama, length))
    check_errors(refused_over_ranks(sp, tokens, part, llama))
    assert type(plain) is kind
    layers = [*plain.modules(), *of_layers.modules()]
    assert all(type(layer) is not models.RingAttention for layer in layers)
    assert all(p.data.equal(w) for p, w in zip(plain.parameters(), weights, strict=True))
    plain(tokens, length=torch.tensor([TOKENS, TOKENS], device=DEVICE))
    pickled = "TypeError: an enabled Llama cannot be copied or pickled, as torch.save does: save"
    saved = folder / "never.pt"
    check_errors([(pickled, lambda: copy.deepcopy(llama))])
    check_errors([(pickled, lambda: torch.save(llama, saved))])
    llama(part, length=length)


def refused_models(sp, llama, plain, of_layers) -> list[tuple]:
    """Return the errors of calls of enable that are refused, and the calls."""
    import model_center.model as zoo
    from model_center.layer import Attention

    from bmt_burst.adapters import model_center

    class Other(zoo.Llama):
        def forward(self, *args, **named):
            return super().forward(*args, **named)

    class OtherAttention(Attention):
        pass

    def enable(model, **options):
        return lambda: model_center.enable(model, sp, **options)

    def changed(**changes):
        return enable(build("Llama", torch.float32, **changes))

    of_layers.encoder.layers[1].self_att.self_attention.__class__ = OtherAttention
    sizes = {name: x for name, x in SIZES.items() if name != "num_layers"}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "half": False}
    t5 = zoo.T5(zoo.T5Config(**sizes))
    rotary, bias = build("GPT2", torch.float32), "relative"
    lost = "overrides the forward of {}, which would be lost"
    return [
        (
            "TypeError: sp must be a SequenceParallel, from",
            lambda: model_center.enable(plain, None),
        ),
        (f"TypeError: {KNOWN} Linear", enable(torch.nn.Linear(2, 2))),
        (f"TypeError: {KNOWN} ModuleDict: pass its lm", enable(torch.nn.ModuleDict({"lm": plain}))),
        ("ValueError: this Llama is already enabled, for 2 ranks", enable(llama)),
        ("TypeError: T5 cannot be sequence parallel: its decoder attends to another", enable(t5)),
        (f"TypeError: this Other {lost.format('Llama')}", enable(Other(plain.config))),
        (f"TypeError: a layer {lost.format('Attention')}: OtherAttention", enable(of_layers)),
        ("ValueError: pos_bias_type must be 'rotary' or 'none'", changed(pos_bias_type=bias)),
        ("ValueError: att_mask_value must be -10000.0 or less, so", changed(att_mask_value=-10)),
        ("ValueError: exact_rotary needs a model with rotary", enable(rotary, exact_rotary=True)),
    ]


def refused_arguments(sp, part, llama, length) -> list[tuple]:
    """Return the errors of wrong arguments, and the calls. Ranks share them, but for a length."""
    from bmt_burst.adapters import model_center

    dropping = model_center.enable(build("Llama", torch.float32, dropout_p=0.1), sp)
    gpt2 = model_center.enable(build("GPT2", torch.float32, position_size=TOKENS - 1), sp)
    bert = model_center.enable(build("Bert", torch.float32), sp)
    dense = torch.ones(2, TOKENS, TOKENS, device=DEVICE)
    of_rank = torch.tensor([TOKENS, sp.rank], device=DEVICE)
    mask, longer = Mask.causal(TOKENS), Mask.causal(TOKENS + 1)
    layout, differ = Layout.zigzag(TOKENS + 1, sp.size), "rank 0 has [37, 0], rank 1 has [37, 1]"
    two = "length, attention_mask, mask, got length and mask"
    return [
        ("", lambda: dropping.eval()(part)),
        (
            "ValueError: this GPT2 has embeddings of 36 positions, got position 36",
            lambda: gpt2(part),
        ),
        ("ValueError: expected tokens, as input_ids or inputs_embeds, got none", llama),
        ("ValueError: tensors of this rank's", lambda: bert(part, token_type_ids=part[:, 1:])),
        ("ValueError: attention_mask must be of this", lambda: llama(part, attention_mask=dense)),
        (f"ValueError: expected one of {two}", lambda: llama(part, length=length, mask=mask)),
        (f"RanksDisagree: ranks differ in length: {differ}", lambda: llama(part, length=of_rank)),
        ("ValueError: length must be of whole rows, 37", lambda: llama(part, length=length + 1)),
        ("ValueError: length must be integers (2,), one", lambda: llama(part, length=length[:1])),
        ("ValueError: the layout is for sequences of 38", lambda: llama(part, layout=layout)),
        ("ValueError: the mask has 38 tokens, the ranks hold 37", lambda: llama(part, mask=longer)),
    ]


def refused_over_ranks(sp, tokens, part, llama) -> list[tuple]:
    """Return the errors of calls that only ranks which share a sequence refuse, and the calls. What
    is wrong on rank 0 alone is an error of the others too.
    """
    from bmt_burst.adapters import model_center

    dropping = model_center.enable(build("Llama", torch.float32, dropout_p=0.1), sp)
    bert = model_center.enable(build("Bert", torch.float32), sp)
    past = [(torch.zeros(2, 4, 3, 8, device=DEVICE),) * 2] * 2
    see_all = torch.ones(2, 1, 1, dtype=torch.bool, device=DEVICE)
    holds = "ValueError: the ranks hold [37, 18] tokens, but zigzag cuts 55 into [27, 28]"
    cache = "ValueError: use_cache and past_key_values need whole sequences, and these are cut over"
    layers = "TypeError: attention over 2 ranks got a Tensor as its mask: call the enabled model"
    dropout = "ValueError: attention over ranks cannot drop probabilities, and dropout_p is 0.1"
    failed = "RanksDisagree: rank 0 of the group failed before {}: " if sp.rank else ""
    theirs = failed.format("the forward of a Bert")
    found = [
        (holds, lambda: llama(tokens if sp.rank == 0 else part)),
        (cache, lambda: llama(part, past_key_values=past)),
    ]
    for start, wrong in (
        (cache, {"use_cache": True}),
        ("ValueError: output_pooler_output is computed from", {"output_pooler_output": True}),
        ("TypeError: Bert.forward() got an unexpected keyword argument 'more'", {"more": 1}),
    ):
        given = {} if sp.rank else wrong
        found.append((theirs + start, lambda given=given: bert(part, **given)))
    theirs = failed.format("a call of burst_attn_func")
    found.append((theirs + dropout, lambda: dropping.train(sp.rank == 0)(part)))
    return [*found, (layers, lambda: llama.encoder(llama.input_embedding(part), see_all))]


def refused_biased(folder: Path) -> None:
    """Check the errors of what models with learned biases refuse."""
    from bmt_burst.adapters import batch, model_center

    def enabled(name, **changes):
        return model_center.enable(build(name, torch.float32, **changes), sp)

    sp, at = init_sequence_parallel(), torch.arange(TOKENS, device=DEVICE)
    tokens = sp.shard(random_tensors("CPM1", 2)["tokens"])
    length = torch.tensor([TOKENS, 9], device=DEVICE)
    cpm1, cpm3, first = enabled("CPM1"), enabled("CPM3"), torch.zeros_like(tokens)
    places, zeros = sp.shard(at, 0), torch.zeros(TOKENS, dtype=torch.int64, device=DEVICE)
    # of which no token is seen, nor sees with a context
    of_padding = sp.shard(torch.where(at < 9, at, 0), 0)
    mask, causal = Mask.documents((0, 9, TOKENS)), Mask.causal(TOKENS)
    row, padded = {"position_ids": of_padding}, length[1:].expand(2)
    places_of_mask = sp.shard(mask.positions().to(DEVICE), 0)
    strange = sp.shard(zeros.index_fill(0, at[20:23], 34), 0)
    falling = "ValueError: position_ids do not rise by one at token"
    segments = "ValueError: token_type_ids must be segments from 0 to 33, got"
    given, two = first if sp.rank else None, ["zigzag", "striped"]
    differ = "RanksDisagree: ranks differ in span: rank 0 has None, rank 1 has 'given'"
    wrong = [
        ("ValueError: pos_bias_type must be 'rel", lambda: enabled("CPM1", pos_bias_type="none")),
        (
            "ValueError: position_bias_max_distance must be above 20, since",
            lambda: enabled("CPM3", position_bias_num_buckets=80),
        ),
        ("ValueError: expected a mask alone", lambda: cpm1(tokens, mask=causal, context=first)),
        ("ValueError: span must be of this rank's", lambda: cpm1(tokens, span=first[:, 1:])),
        ("ValueError: span must be integers", lambda: cpm1(tokens, span=first.float())),
        ("TypeError: context must be a torch.Tensor, got", lambda: cpm1(tokens, context=[True])),
        (differ, lambda: cpm1(tokens, span=given)),
        ("ValueError: rows with different layouts", lambda: cpm1(tokens, span=first, layout=two)),
        (f"{falling} 1 of a row", lambda: cpm1(tokens, position_ids=sp.shard(at // 2, 0))),
        (f"{falling} 9 of a row", lambda: cpm1(tokens, position_ids=places_of_mask)),
        ("", lambda: cpm1(tokens, mask=mask, position_ids=places + 3)),
        (f"{falling} 9 of a row", lambda: cpm1(tokens, length=padded, **row)),
        ("", lambda: cpm1(tokens, length=padded, context=first, **row)),
        (f"{segments} 34 at token 20 of a row", lambda: cpm3(tokens, token_type_ids=strange)),
        (f"{segments} -1 at token 0 of a row", lambda: cpm3(tokens, token_type_ids=first - 1)),
        ("", lambda: cpm3(tokens, length=length, span=first)),
    ]
    check_errors(wrong)
    most, batch._MOST_SLICES = batch._MOST_SLICES, 200
    alternate = "ValueError: padding, context and spans alternate too often: expected a mask of at"
    check_errors([(alternate, lambda: cpm1(tokens, context=sp.shard(at % 2, 0)))])
    batch._MOST_SLICES = most


def rotary(folder: Path) -> None:
    """Check rotary angles: those of ModelCenter in fp16, or exact ones in fp32.

    fp16 rounds the angles of 2200 positions by up to a radian, and both models alike; fp32 by 1e-4.
    """
    from bmt_burst.adapters import model_center

    sp = init_sequence_parallel()
    tokens = torch.randint(0, 97, (1, 66000), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    few, length = tokens[:, :2200], torch.tensor([2200], device=DEVICE)  # fp16 has 2048 exactly
    infinite = "ValueError: position 65999 is infinite in torch.float16"
    for name in ("Llama", "GPTj"):
        for dtype in (torch.half, torch.float32):
            model = build(name, dtype, num_layers=1, num_heads=1, dim_model=8, dim_ff=8)
            with torch.no_grad():
                whole = model(few, length=length).last_hidden_state
                model_center.enable(model, sp, exact_rotary=dtype == torch.float32)
                found = model(sp.shard(few)).last_hidden_state
            assert relative_error(found, sp.shard(whole)) < 1e-3, (name, dtype)
            if dtype == torch.half:
                check_errors([(infinite, lambda model=model: model(sp.shard(tokens)))])
        for table, exact in zip(
            model._exact_tables(torch.tensor([1, 66000])), (math.cos, math.sin), strict=True
        ):
            assert table[:, 0].tolist() == pytest.approx([exact(1), exact(66000)], abs=1e-6)
        if name == "Llama":  # whose frequencies have a dtype of their own
            model._exact_rotary = False
            model.position_bias.inv_freq = model.position_bias.inv_freq.half()
            check_errors([(infinite, lambda model=model: model(sp.shard(tokens)))])


def alone(folder: Path) -> None:
    """Check a model that is enabled for one rank: what comes out, a loss without logits,
    generation.
    """
    from bmt_burst.adapters import model_center

    plain = build("Llama", torch.float32).eval()
    tokens = random_tensors("Llama", 2)["tokens"]
    length = torch.tensor([TOKENS, TOKENS], device=DEVICE)
    before = plain(tokens, length=length)
    start = plain(tokens[:, :30], length=length - 7, use_cache=True)
    expected = plain(
        tokens[:, 30:], length=length, use_cache=True, past_key_values=start.past_key_values
    ).logits
    model = model_center.enable(plain, SequenceParallel())
    out, labels = model(tokens, length=length, return_dict=False), shift_labels(tokens)
    loss, _ = cross_entropy_sum(out[2], labels)
    without_logits, _ = linear_cross_entropy_sum(
        model(tokens, output_logits=False).last_hidden_state, model.output_projection.weight, labels
    )
    start = model(tokens[:, :30], length=length - 7, use_cache=True)
    again = model(
        tokens[:, 30:], length=length, use_cache=True, past_key_values=start.past_key_values
    ).logits
    assert model is plain
    assert relative_error(out[0], before.last_hidden_state) < 1e-6
    assert relative_error(out[2], before.logits) < 1e-6
    assert relative_error(without_logits, loss) < 1e-6
    assert again.equal(expected)
    refused = "ValueError: expected a cache or mask and layout"
    check_errors([(refused, lambda: model(tokens, use_cache=True, layout="striped"))])


def memory(folder: Path) -> None:
    """Check that an enabled model has no tensor as large as a mask.

    With a learned bias, CPUs write out the scores of 4 heads, a block.
    """
    from bmt_burst.adapters import model_center

    sp = init_sequence_parallel()
    tokens = torch.randint(0, 97, (1, 700), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    length, part = torch.tensor([700], device=DEVICE), sp.shard(tokens)
    for name, most in (("Llama", 1), ("CPM1", 4)):
        model, entries = build(name, torch.float32), []
        for given in (tokens, part):
            with Largest() as largest:
                model(given, length=length).last_hidden_state.sum().backward()
            entries.append(largest.entries)
            if given is tokens:
                model_center.enable(model, sp)
        assert entries[0] >= 700**2 and entries[1] <= most * part.numel() ** 2, (name, entries)


def example(folder: Path, name: str) -> None:
    """Run an example, on CPUs in fp32, which needs none of BMTrain's CUDA kernels."""
    changes = {
        "half=True": "half=False",
        "loss_scale=1024": "loss_scale=None",
        "LENGTH, STEPS = 1024, 20": "LENGTH, STEPS = 128, 5",
        "bmt.init_distributed(seed=0)": "torch.manual_seed(0)",
        '"cuda"': '"cpu"',
    }
    run_example(folder, f"model_center_{name}", changes if DEVICE == "cpu" else {})


def weights(folder: Path) -> None:
    """Check that a dense CPM reads the weights of Llamas. test_weights.py has other models."""
    import bmtrain

    tokens = torch.arange(TOKENS).unsqueeze(0)
    whole = torch.tensor([TOKENS], device=DEVICE)
    for name, changes in WRITTEN.items():
        model, place = build(name, torch.float32, **changes), folder / f"saved {name}"
        place.mkdir()
        bmtrain.save(model, str(place / "pytorch_model.pt"))
        (place / "config.json").write_text(json.dumps(SIZES | CONFIGS[name] | changes))
        with torch.inference_mode():
            logits = model(tokens.to(DEVICE), length=whole).logits
            ours = load_cpm(place)(tokens, torch.arange(TOKENS))
        assert relative_error(ours, logits.cpu()) < 1e-5, name


def stand_in(name: str, **members) -> None:
    """A module where there is none: ModelCenter imports some for Longformer and for downloads
    alone.
    """
    if importlib.util.find_spec(name.split(".")[0]) is None:
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


TASKS = {
    task.__name__: task
    for task in (equality, refused, refused_biased, rotary, alone, memory, example, weights)
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder, tasks = Path(sys.argv[1]), json.loads(sys.argv[2])
    stand_in("transformers.modeling_outputs", BaseModelOutputWithPoolingAndCrossAttentions=object)
    stand_in("transformers")
    stand_in("requests")
    if DEVICE == "cpu":
        from tests import fake_cuda

        dist.init_process_group("gloo")
        fake_cuda.install("model_center.model")
    elif tasks[0][0] != "example":
        import bmtrain

        bmtrain.init_distributed(seed=0)
    for name, *arguments in tasks:
        TASKS[name](folder, *arguments)
    if DEVICE == "cpu":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
