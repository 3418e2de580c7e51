"""Models of transformers over ranks: logits, losses and gradients are those of the plain model, and
what is refused.

Ranks are simulated, but for those of torch.distributed, which are processes.
"""

import copy
import functools
import pickle
import re
import types

import pytest
import torch
import transformers as hf
from torch import nn
from torch.distributed.fsdp import fully_shard

from bmt_burst import Layout, Mask, SequenceParallel, init_sequence_parallel, simulate
from bmt_burst.adapters.transformers import ATTENTION, enable
from tests.launcher import ROOT, run_ranks, run_script
from tests.reference import relative_error
from tests.refusals import refusal

BOUND = 1e-5  # rounding of fp32, through two layers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that attention is far from a mean
    "pad_token_id": 0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4}
LONG["long_factor"] = [3.0, 4.0, 5.0, 6.0]
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
BETWEEN = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BY_KIND = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}
BY_KIND["sliding_attention"]["rope_theta"] = 100.0
CONFIGS = {  # by family and what is special: what it has besides SIZES
    "Llama": {},
    "Llama, rotary by length": {"rope_parameters": DYNAMIC, "max_position_embeddings": 30},
    "Mistral": {"sliding_window": 7, "head_dim": 16},
    "Ministral": {"head_dim": 16, **BETWEEN},
    "Qwen2, windows above": {**WINDOWS, "num_hidden_layers": 3, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Qwen3, windows between": {**WINDOWS, **BETWEEN},
    "Qwen3Moe": {"head_dim": 16, **MOE, **WINDOWS, "max_window_layers": 1},
    "Phi3": {"sliding_window": 11},
    "Phi3, long": {
        "rope_parameters": LONG,
        "original_max_position_embeddings": 30,
        "max_position_embeddings": 60,
    },
    "MiniCPM3": {**MLA, "v_head_dim": 12, "num_key_value_heads": 4},
    "Gemma2": {
        "sliding_window": 9,
        "head_dim": 8,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 0.8,
        # before transformers 5.2x the default, sdpa, leaves the softcap out
        "attn_implementation": "eager",
    },
    "Gemma3": {"head_dim": 8, "query_pre_attn_scalar": 4, **BETWEEN},
    "Gemma3, rotary by length": {
        "head_dim": 8,
        **BETWEEN,
        "rope_parameters": BY_KIND,
        "max_position_embeddings": 30,
    },
    "GptOss": {"sliding_window": 9, "head_dim": 8, **EXPERTS},
}
if not hasattr(hf, "MiniCPM3Config"):  # before transformers 5.2x
    del CONFIGS["MiniCPM3"]


@functools.cache
def plain(name: str) -> hf.PreTrainedModel:
    family = name.partition(",")[0]
    text = "Text" * (family == "Gemma3")  # its other configuration is of images too
    config = getattr(hf, f"{family}{text}Config")(**{**SIZES, **CONFIGS[name]})
    torch.manual_seed(0)
    return getattr(hf, f"{family}ForCausalLM")(config)


def enabled(model: hf.PreTrainedModel, sp: SequenceParallel, **options) -> hf.PreTrainedModel:
    """A copy with the same parameters."""
    return enable(copy.deepcopy(model, {id(p): p for p in model.parameters()}), sp, **options)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(length))


def packed(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


def calls() -> dict[str, dict]:
    """Arguments of a forward."""
    whole, row = tokens(2, 37), tokens(1, 41)
    few = whole.masked_fill(
        torch.rand(2, 37, generator=torch.Generator().manual_seed(0)) < 0.7, -100
    )
    rows = torch.cat((packed(20, 17), packed(5, 1, 31)))
    return {
        "whole": {"input_ids": whole, "labels": whole},
        "few targets": {
            "input_ids": whole,
            "labels": few,
            "num_items_in_batch": torch.tensor([50.0]),
        },
        "documents": {"input_ids": whole, "labels": whole, "position_ids": packed(13, 20, 4)},
        "documents of rows": {"input_ids": whole, "labels": whole, "position_ids": rows},
        "later positions": {
            "input_ids": row,
            "labels": row,
            "shift_labels": row.roll(-1, 1),
            "position_ids": torch.arange(3, 44).unsqueeze(0),
        },
        "padding": padded(for_eager=True),
    }


def padded(for_eager: bool = False) -> dict[str, torch.Tensor]:
    """Rows with padding on the right, on the left, on both sides, and nowhere.

    for_eager  leave out the target that padding on the left predicts, since transformers' eager
               attention lets this padding see everything
    """
    places, whole = torch.arange(37), tokens(4, 37)
    first, stop = torch.tensor([[0, 20], [11, 37], [3, 30], [0, 37]]).T.unsqueeze(-1)
    real = (places >= first) & (places < stop)
    targets = real & (places > first) if for_eager else real
    return {
        "input_ids": whole.where(real, 0),
        "labels": whole.masked_fill(~targets, -100),
        "attention_mask": real.long(),
    }


def calls_of(name: str) -> dict[str, dict]:
    """Those that a model takes."""
    return {
        kind: call
        for kind, call in calls().items()
        if name != "GptOss" or not kind.startswith("documents")
    }


def results(
    model: hf.PreTrainedModel, loss: torch.Tensor, logits: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The loss, logits and the gradient of each parameter."""
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), **grads}


def expected_results(model: hf.PreTrainedModel, call: dict) -> dict[str, torch.Tensor]:
    out = model(**call, use_cache=False)  # with a cache transformers does not tell documents apart
    return results(model, out.loss, out.logits)


def over_ranks(
    model: hf.PreTrainedModel, call: dict, size: int, layout: str | Layout = "zigzag", **options
):
    """What simulated ranks find, of gradients the mean, as DDP has it."""

    def work(ring):
        sp = SequenceParallel(ring.rank, size, layout, process_group=ring)
        out = enabled(model, sp, **options)(**call)
        return out.loss, out.logits

    found = simulate(size, work)
    losses = torch.stack([loss for loss, _ in found])
    assert losses.eq(losses[0]).all()  # ranks have the same one
    if call.get("whole_outputs"):
        assert all(torch.equal(logits, found[0][1]) for _, logits in found)
        return results(model, losses.mean(), found[0][1])
    length = call["input_ids"].shape[1]
    whole = layout if isinstance(layout, Layout) else Layout.named(layout, length, size)
    return results(model, losses.mean(), whole.unshard([logits for _, logits in found]))


def check(
    got: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    call: dict,
    bound: float = BOUND,
) -> None:
    valid = call.get("attention_mask", torch.ones(call["input_ids"].shape)).bool()
    for found in (got, expected):
        found["logits"] = found["logits"][valid]
    assert got.keys() == expected.keys()
    for name in expected:
        assert relative_error(got[name], expected[name]) < bound, name


LAYOUTS = {"Llama": "contiguous", "Qwen3, windows between": "striped", "Phi3, long": "contiguous"}


@pytest.mark.parametrize(
    ("name", "size"), [("Llama", 1), *((x, 3 if x in LAYOUTS else 2) for x in CONFIGS)]
)
def test_enabled_models_equal_the_plain_one(name, size):
    layout, model = LAYOUTS.get(name, "zigzag"), plain(name)
    for call in calls_of(name).values():
        check(over_ranks(model, call, size, layout), expected_results(model, call), call)


def apart(model: hf.PreTrainedModel, call: dict, documents: list) -> dict[str, torch.Tensor]:
    """The plain model's results from a call for each document alone, (row, start, stop)."""
    ids = call["input_ids"]
    places = call.get("position_ids", torch.arange(ids.shape[1])).expand_as(ids)
    logits = torch.zeros(*ids.shape, 64)
    for row, start, stop in documents:
        part = row, slice(start, stop)
        out = model(ids[part][None], torch.ones(1, stop - start), places[part][None])
        logits[part] = out.logits[0]
    return results(model, model.loss_function(logits, call["labels"], 64), logits)


def named_documents() -> dict[str, tuple[dict, list]]:
    """Arguments that name documents, and these documents."""
    three = [(0, 0, 13), (0, 13, 33), (0, 33, 37)]
    bounds = torch.tensor([0, 13, 33, 37], dtype=torch.int32)
    numbers = torch.tensor([[7] * 13 + [2] * 20 + [3] * 4])
    cu_seq_lens = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    lengths = {"max_length_q": 20, "max_length_k": torch.tensor(20)}
    falling = {"position_ids": packed(13, 20, 4)}
    rising = torch.cat((torch.arange(7), torch.arange(50, 80))).unsqueeze(0)
    # skips within documents and at the second border
    skips = {"position_ids": rising.clone()}
    skips["position_ids"][:, 13:33] = torch.arange(20) * 3 + 14
    holes = torch.tensor([[0, 0] + [1] * 11 + [0] * 3 + [4] * 17 + [3] * 4])
    rows = torch.cat((torch.tensor([[5] * 9 + [1] * 20 + [0] * 8]), holes))
    return {
        "positions": (falling, three),
        "numbers": ({"attention_mask": numbers}, three),
        "numbers and positions": ({"attention_mask": numbers, **falling}, three),
        "cu_seq_lens": (cu_seq_lens, three),
        "one of cu_seq_lens": ({"cu_seq_lens_k": bounds.long()}, three),
        "all of them": (
            {**cu_seq_lens, **lengths, **falling, "seq_idx": numbers, "attention_mask": numbers},
            three,
        ),
        "skips in numbers": ({**skips, "attention_mask": numbers}, three),
        "skips in cu_seq_lens": ({**skips, **cu_seq_lens}, three),
        "skips in one document": (
            {"position_ids": rising, "attention_mask": torch.ones(1, 37)},
            [(0, 0, 37)],
        ),
        "an empty document": ({"cu_seq_lens_q": torch.tensor([0, 13, 13, 33, 37])}, three),
        "positions of a padded row": (
            {"position_ids": packed(13, 20, 1, 1, 1, 1)},
            [*three[:2], *((0, x, x + 1) for x in range(33, 37))],
        ),
        # borders within padding do not matter
        "cu_seq_lens over padding": (
            {"cu_seq_lens_q": torch.tensor([0, 37]), "attention_mask": torch.arange(37)[None] < 33},
            [(0, 0, 33)],
        ),
        "cu_seq_lens within padding": (
            {
                "cu_seq_lens_q": torch.tensor([0, 13, 33, 35, 37]),
                "attention_mask": numbers.where(torch.arange(37) < 33, 0),
            },
            three[:2],
        ),
        "rows of numbers": (
            {"attention_mask": rows},
            [(0, 0, 9), (0, 9, 29), (1, 2, 13), (1, 16, 33), (1, 33, 37)],
        ),
    }


@pytest.mark.parametrize("how", named_documents())
def test_documents_equal_calls_of_each_alone(how):
    named, documents = named_documents()[how]
    ids = tokens(1 + documents[-1][0], 37)
    padding = named.get("attention_mask", torch.ones_like(ids)).eq(0)
    # padding is in no document, and so predicts nothing here
    labels = ids.masked_fill(padding | padding.roll(1, 1), -100)
    call = {"input_ids": ids, "labels": labels, **named}
    for name, size, balanced in (("Llama", 2, False), ("Mistral", 3, True)):
        got = over_ranks(plain(name), {**call, "whole_outputs": True}, size, balanced=balanced)
        check(got, apart(plain(name), call, documents), call)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("Llama", 2, {}),
        ("Llama", 3, {"balanced": True}),
        ("Mistral", 3, {"strategy": "all-gather"}),
        ("Qwen3Moe", 2, {"balanced": True, "strategy": "ulysses"}),
    ],
)
def test_padding_on_any_side_equals_sdpa(name, size, options):
    """The loss has the targets that padding on the left predicts: its attention is 0. One row is
    padding alone.
    """
    nothing = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    call = {key: torch.cat((x, x.new_full((1, 37), nothing[key]))) for key, x in padded().items()}
    expected = expected_results(plain(name), call)
    whole = {**call, "whole_outputs": True}
    check(over_ranks(plain(name), whole, size, **options), expected, call)


def test_real_tokens_do_not_see_padding():
    """Positions of padding count in the longest one, as in transformers."""
    call, model = padded(), plain("Llama, rotary by length")
    real, ids = call["attention_mask"].bool(), call.pop("input_ids")
    others = ids.where(real, tokens(4, 37).flip(1))
    later = torch.randint(500, (4, 37), generator=torch.Generator().manual_seed(0))

    def logits_of(ids, places):
        whole = {**call, "input_ids": ids, "position_ids": places, "whole_outputs": True}
        return over_ranks(model, whole, 2, balanced=True)["logits"]

    places = torch.arange(37).expand(4, 37)
    assert torch.equal(logits_of(others, places)[real], logits_of(ids, places)[real])
    places = places.where(real, later)
    expected = model(ids, call["attention_mask"], places, use_cache=False).logits
    assert relative_error(logits_of(ids, places), expected) < BOUND


def test_a_loss_of_whole_hidden_states_adds_its_gradient():
    model, call = plain("Llama"), {**calls()["whole"], "output_hidden_states": True}

    def loss_of(out, whole):
        return out.loss + whole[:, -1].sin().sum()

    def work(ring):
        sp = SequenceParallel(ring.rank, 3, process_group=ring)
        out = enabled(model, sp)(**call)
        return loss_of(out, sp.unshard(out.hidden_states[-1], 37))

    out, losses = model(**call), torch.stack(simulate(3, work))
    expected = results(model, loss_of(out, out.hidden_states[-1]), out.logits)
    check(results(model, losses.mean(), out.logits), expected, call)


def test_logits_of_balanced_documents_are_in_the_order_of_their_layout():
    call = calls()["documents"]
    layout = Layout.balanced(Mask.documents((0, 13, 33, 37)), 3)
    assert layout != Layout.zigzag(37, 3)
    expected = expected_results(plain("Mistral"), call)["logits"]

    def work(ring):
        sp = SequenceParallel(ring.rank, 3, process_group=ring)
        return enabled(plain("Mistral"), sp, balanced=True)(**call).logits

    assert relative_error(layout.unshard(simulate(3, work)), expected) < BOUND


def test_autocast_reaches_attention():
    """Rotary embeddings make fp32 of queries and keys, values are bf16. Errors are a few of
    2^-8.
    """
    call = calls()["whole"]
    with torch.autocast("cpu", torch.bfloat16):
        expected = expected_results(plain("Qwen3"), call)
        got = over_ranks(plain("Qwen3"), call, 2)
    for name in ("loss", "logits", "lm_head.weight"):
        assert relative_error(got[name], expected[name]) < 0.03, name


def test_compiled_models_equal_and_are_not_compiled_for_other_documents():
    """What ranks agree on and attention are left alone, for other masks too."""
    model = hf.MistralForCausalLM(hf.MistralConfig(**SIZES | {"num_hidden_layers": 1}))
    compiled = torch.compile(enabled(model, SequenceParallel()), backend="eager")
    graphs = []
    for name in ("whole", "documents"):
        out = compiled(**{"position_ids": torch.arange(37).unsqueeze(0)} | calls()[name])
        check(
            results(model, out.loss, out.logits),
            expected_results(model, calls()[name]),
            calls()[name],
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_without_labels_there_is_no_loss_and_tuples_stay_tuples():
    model = enabled(plain("Llama"), SequenceParallel())
    ids = tokens(1, 9)
    out = model(ids, output_hidden_states=True)
    assert out.loss is None and out.past_key_values is None and len(out.hidden_states) == 3
    [logits] = model(ids, return_dict=False)
    assert torch.equal(logits, out.logits)
    assert relative_error(logits, plain("Llama")(ids).logits) < BOUND
    loss, logits = model(ids, labels=ids, return_dict=False)
    assert relative_error(loss, plain("Llama")(ids, labels=ids).loss) < BOUND
    # a mean of nothing, as before
    assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()


def test_copies_pickles_and_what_is_saved(tmp_path):
    config, ids = copy.deepcopy(plain("Phi3, long").config), tokens(1, 37)
    ours, other = (hf.Phi3ForCausalLM(config) for _ in range(2))
    enable(ours, SequenceParallel())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is type(ours)
        assert torch.equal(again(ids, labels=ids).logits, ours(ids, labels=ids).logits)
    assert isinstance(ours, hf.Phi3ForCausalLM)
    assert ours.model.config._attn_implementation == ATTENTION
    # though it shared its configuration
    assert other.model.config._attn_implementation != ATTENTION
    ours.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is hf.Phi3ForCausalLM and loaded.config._attn_implementation != ATTENTION
    assert relative_error(loaded(ids).logits, ours(ids).logits) < BOUND
    ours._sp = SequenceParallel(0, 2, process_group=object())
    again = pickle.loads(pickle.dumps(ours))
    with pytest.raises(RuntimeError, match=r"Call attach\(sp\) of the layer or model"):
        again(ids, labels=ids)
    with pytest.raises(TypeError, match=r"must be a SequenceParallel, .*, got dict"):
        ours.attach(SequenceParallel().groups)
    ours.attach(SequenceParallel())
    again.attach(SequenceParallel())
    assert torch.equal(again(ids, labels=ids).logits, ours(ids, labels=ids).logits)
    ours.compile(backend="eager")  # which pickles leave out
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)


def test_only_the_adapter_imports_transformers():
    """Compat imports it inside of the function that replaces an attention of transformers."""
    adapter = ROOT / "bmt_burst/adapters/transformers"
    for path in (ROOT / "bmt_burst").rglob("*.py"):
        if adapter not in path.parents:
            assert not re.search(r"^(import|from) transformers", path.read_text(), re.M), path


class OtherForward(hf.LlamaForCausalLM):
    def forward(self, *args, **named):
        return super().forward(*args, **named)


def test_models_that_cannot_be_are_refused():
    llama = plain("Llama")
    other_attention, own_forward, other_loss = (copy.deepcopy(llama) for _ in range(3))
    layers = copy.deepcopy(plain("Mistral")).model.layers
    other_attention.model.layers[1].self_attn = layers[1].self_attn
    own_forward.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    other_loss.loss_function = lambda **_: 0
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    inside, other_forward = nn.ModuleDict({"lm": llama}), OtherForward(llama.config)
    known = "expected one of transformers' LlamaForCausalLM, MistralForCausalLM, .*, got a"
    layer, other = "a layer's attention, a", "has another forward than transformers' Llama"
    for model, message in (
        (gpt2, f"TypeError: {known} GPT2LMHeadModel: untested=True compares a small copy of it"),
        (inside, f"TypeError: {known} ModuleDict: pass its lm, a LlamaForCausalLM"),
        (other_forward, f"TypeError: this OtherForward {other}ForCausalLM"),
        (other_attention, f"TypeError: {layer} MistralAttention, {other}Attention"),
        (own_forward, f"TypeError: {layer} LlamaAttention, {other}Attention"),
        (other_loss, "ValueError: this LlamaForCausalLM has another loss than transformers'"),
        (enabled(llama, SequenceParallel()), "ValueError: .* is already enabled, for 1 ranks"),
    ):
        with refusal(message):
            enable(model, SequenceParallel())


def test_forwards_of_other_packages_are_refused(monkeypatch):
    """In the object or the class, of the model, its base, or the base below another head."""
    another = "has another forward than transformers' Llama"
    headed = hf.LlamaForSequenceClassification(plain("Llama").config)
    for model, part, message in (
        (copy.deepcopy(plain("Llama")), lambda model: model, f"this LlamaForCausalLM {another}"),
        (
            copy.deepcopy(plain("Llama")),
            lambda model: model.model,
            f"the LlamaModel of this LlamaForCausalLM {another}Model",
        ),
        (headed, lambda model: model.model, f"this LlamaForSequenceClassification {another}Model"),
    ):
        patched = part(model)
        own_forward = type(patched).forward

        def other(self, *args, own_forward=own_forward, **named):
            return own_forward(self, *args, **named)

        functools.update_wrapper(other, own_forward)
        for changed, new in ((patched, types.MethodType(other, patched)), (type(patched), other)):
            with monkeypatch.context() as patching:
                patching.setattr(changed, "forward", new)
                with refusal(f"TypeError: {message}"):
                    enable(model, SequenceParallel())


def test_layers_that_need_whole_sequences_are_refused():
    chunked = copy.deepcopy(plain("Qwen3"))
    chunked.config.layer_types = ["full_attention", "chunked_attention"]
    sizes = {**SIZES, "head_dim": 8, **MOE, "shared_expert_intermediate_size": 8}
    linear = hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**sizes, layer_types=["linear_attention"] * 2)
    )
    for model, kind, untested in (
        (chunked, "chunked_attention", False),
        (chunked.model, "chunked_attention", False),
        (linear, "linear_attention", True),
    ):
        name = type(model).__name__
        with refusal(f"TypeError: this {name} has layers of {kind}: expected layers of full_atte"):
            enable(model, SequenceParallel(), untested=untested)


def test_what_models_and_layers_ask_for_is_refused():
    names = "Mistral", "Qwen3, windows between", "Llama", "GptOss", "GptOss", "Gemma2"
    window, exchanged, sides, routers, documents, both = (copy.deepcopy(plain(x)) for x in names)
    attention = window.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.sliding_window = 3
    exchanged.model.layers = nn.ModuleList(reversed(exchanged.model.layers))
    sides.model.layers[1].self_attn.is_causal = False
    routers.config.output_router_logits = True
    both.config.use_bidirectional_attention = True
    mask = "and its model makes masks with one of"
    for model, call, message in (
        (window, "whole", f"a MistralAttention has a window of 3, {mask} 7"),
        (exchanged, "whole", f"a Qwen3Attention has a window of None, {mask} 5"),
        (sides, "whole", "is_causal is False in a LlamaAttention: attention to both sides is not"),
        (routers, "whole", "output_router_logits: the loss of routers needs whole sequences"),
        (documents, "documents", "documents are named, but transformers does not"),
        (both, "whole", "use_bidirectional_attention is True in the configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            over_ranks(model, calls()[call], 2)


def test_options_and_enabled_parts_are_checked():
    ours = enabled(plain("Llama"), SequenceParallel())
    ids, alone = tokens(1, 5), "was called without its model: call the model that was enabled, not"
    llama, phi = "an enabled LlamaForCausalLM", enabled(plain("Phi3, long"), SequenceParallel())
    with refusal("TypeError: sp must be a SequenceParallel, from"):
        enable(plain("Llama"), None)
    with refusal("TypeError: balanced must be True or False, got 'yes'"):
        enabled(plain("Llama"), SequenceParallel(), balanced="yes")
    with refusal(f"ValueError: {llama} does not generate, since caches"):
        ours.generate(ids)
    with refusal(f"ValueError: {llama} keeps its attention, since others see only"):
        ours.set_attn_implementation("sdpa")
    with refusal(f"TypeError: the class of {llama} makes no other models: make one"):
        type(ours)(ours.config)
    for model, part in ((ours, "LlamaAttention"), (phi, "Phi3RotaryEmbedding")):
        with refusal(f"TypeError: a {part} {alone}"):
            model.model(ids)


IDS, OF_ROWS = tokens(2, 37), torch.arange(37).expand(2, -1)
ROW = {"input_ids": tokens(1, 37), "labels": tokens(1, 37)}
BOUNDS = torch.tensor([0, 30, 37])
ONE_SOURCE = "expected either input_ids or inputs_embeds, got "
REFUSED = [  # what is wrong on all ranks, and how its error begins
    ({"use_cache": True}, "use_cache and past_key_values need whole sequences"),
    ({"output_attentions": True}, "output_attentions: attention over ranks never"),
    ({"logits_to_keep": 1}, "logits_to_keep counts tokens of whole sequences"),
    ({"past_key_values": []}, "use_cache and past_key_values need whole sequences"),
    ({"cache": []}, "use_cache and past_key_values need whole sequences"),
    ({"other": IDS}, "other: cannot cut an unknown argument over ranks"),
    ({"whole_outputs": "yes"}, "whole_outputs must be True or False, got 'yes'"),
    ({"fused_lm_head": True}, "fused_lm_head: this LlamaForCausalLM had no fused head when it was"),
    (
        {"output_router_logits": True},
        "output_router_logits: the loss of routers needs whole sequences, and these are cut over "
        "ranks; leave it out, or set it to False in the configuration. TRL's trainers ask for it "
        "unless router_aux_loss_coef=0",
    ),
    ({"inputs_embeds": torch.zeros(2, 37, 32)}, f"{ONE_SOURCE}input_ids and inputs"),
    ({"input_ids": None}, f"{ONE_SOURCE}neither"),
    (
        {"input_ids": IDS.new_full((2, 37), 64)},
        "token 64 of input_ids is not in a vocabulary of 64",
    ),
    ({"input_ids": torch.ones(2, 37)}, "input_ids must be int64 or int32, got torch.float32"),
    (
        {"num_items_in_batch": torch.ones(2)},
        "num_items_in_batch must be one number, got shape (2,)",
    ),
    (
        {"input_ids": tokens(2, 1), "labels": None},
        "a sequence of 1 tokens is too short for 2 ranks",
    ),
    (
        {"attention_mask": torch.ones(2, 1, 37, 37)},
        "attention_mask must be of whole sequences, (2, 37), got shape (2, 1, 37, 37): a mask of "
        "S x S cannot be cut over ranks; name documents by numbers",
    ),
    (
        {"position_ids": torch.zeros(3, 1, 37, dtype=torch.int64)},
        "position_ids must be of whole sequences, (2, 37) or (1, 37), got shape (3, 1, 37): "
        "positions of several axes, as of multimodal models, are not supported",
    ),
    ({"attention_mask": OF_ROWS.lt(30)}, "labels must be -100 where attention_mask is 0"),
    (
        {"attention_mask": OF_ROWS.lt(30), "shift_labels": IDS, "labels": None},
        "shift_labels must be -100 where attention_mask is 0",
    ),
    (
        {"attention_mask": OF_ROWS.lt(36), "shift_labels": IDS.where(OF_ROWS.gt(35), -100)},
        "shift_labels must be -100 where attention_mask is 0",
    ),
    ({"attention_mask": OF_ROWS - 1}, "attention_mask must have whole numbers: 0 for padding, and"),
    ({"attention_mask": OF_ROWS / 2}, "attention_mask must have whole numbers: 0 for padding, and"),
    (
        {"attention_mask": OF_ROWS % 5, "labels": None},
        "attention_mask has padding or another document between tokens of one document, in row 0",
    ),
    (
        {"position_ids": torch.cat((packed(30), packed(7) + 40), 1)},
        "position_ids skip forward, and nothing says what it means: to separate documents there, "
        "let position_ids start again, or pass an attention_mask of numbers (1 1 1 2 2 0) or "
        "cu_seq_lens_q; to skip positions within a document, pass an attention_mask of ones",
    ),
    (
        {"attention_mask": torch.ones(2, 37), "position_ids": packed(30, 7)},
        "position_ids start again within a document of attention_mask: name this border there too",
    ),
    (
        {"attention_mask": 1 + OF_ROWS.gt(29).long(), "position_ids": packed(37)},
        "position_ids rise by one across a border of attention_mask: let them start again there",
    ),
    ({"cu_seq_lens_q": BOUNDS}, "cu_seq_lens_q names documents of one row, got a batch of 2"),
    ({**ROW, "cu_seq_lens_k": IDS}, "cu_seq_lens_k must be a tensor of integers of one dimension"),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS / 1},
        "cu_seq_lens_q must be a tensor of integers of one dimension",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS[:2]},
        "cu_seq_lens_q must end at 37, the number of tokens, got 30",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS[1:]},
        "cu_seq_lens_q must be (0, ..., tokens) with at least one",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS, "max_length_q": 29},
        "max_length_q is 29, but cu_seq_lens_q has a document of 30 tokens",
    ),
    ({**ROW, "max_length_k": 30}, "max_length_k needs cu_seq_lens_k"),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": torch.tensor([0, 29, 37])},
        "cu_seq_lens_q and cu_seq_lens_k name different documents: pass one of them",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS, "attention_mask": torch.ones(1, 37)},
        "attention_mask and cu_seq_lens_q name different documents: pass one of them",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS, "seq_idx": OF_ROWS[:1]},
        "cu_seq_lens_q and seq_idx name different documents: pass one of them",
    ),
    (
        {**ROW, "cu_seq_lens_q": BOUNDS, "position_ids": packed(29, 8)},
        "position_ids start again within a document of cu_seq_lens_q: name this border there too",
    ),
]
WHOLE = "(whole, identical on every rank"
OF_TRAINERS = f"{WHOLE}; in a trainer shard by trainer.accelerator.process_index, which counts grou"
LONGER = {"input_ids": tokens(2, 38), "labels": tokens(2, 38)}
DIFFER = [  # what rank 0 alone is given
    ({"input_ids": IDS % 63}, f"ranks differ in input_ids {OF_TRAINERS}ps): rank 0 has"),
    (LONGER, f"ranks differ in input_ids {WHOLE}"),
    ({"position_ids": packed(30, 7)}, "ranks differ in arguments: rank 0 has ['input_ids', 'lab"),
    ({"num_items_in_batch": 7}, f"ranks differ in num_items_in_batch {WHOLE}): rank 0"),
    ({"whole_outputs": True}, "ranks differ in arguments: rank 0 has ['input_ids', 'labels', 'num"),
]


def refused(start: str, failed: str = ""):
    """Return a context in which the error must begin so, after what failed on another rank."""
    return pytest.raises((ValueError, TypeError), match=f"^{re.escape(failed + start)}")


def check_refusals(rank: int) -> None:
    """Check that each of two ranks refuses what is wrong on both, or on the first alone."""
    sp, first = init_sequence_parallel(), rank == 0
    theirs = "" if first else "rank 0 of the group failed before {}: ValueError: "
    forward = theirs.format("the forward of a LlamaForCausalLM")
    theirs_of_call = theirs.format("a call of burst_attn_func")
    base = {"input_ids": tokens(2, 37), "labels": tokens(2, 37)}
    model = enabled(plain("Llama"), sp)
    for wrong, start in REFUSED:
        with refused(start):
            model(**base | wrong)
    labels = base["labels"].clone()
    labels[0, -1] = 64  # which is what rank 0 predicts
    loss = theirs.format("the loss of a LlamaForCausalLM")
    with refused("label 64 is not in a vocabulary of 64", loss):
        model(**base | {"labels": labels})
    base |= {"num_items_in_batch": torch.tensor(5.0)}
    for wrong, start in DIFFER:
        with refused(start):
            model(**base | (wrong if first else {}))
    for same in (5, torch.tensor([5])):
        model(**base | ({"num_items_in_batch": same} if first else {}))
    with refused(f"ranks differ in inputs_embeds {OF_TRAINERS}ps): rank 0 has '(2"):
        model(inputs_embeds=torch.zeros(2, 37, 16 if first else 32))
    model.config.is_causal = False
    with refused("is_causal is False in the configuration"):
        model(**base)
    del model.config.is_causal
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    dropout = "attention over ranks cannot drop probabilities, and attention_dropout is 0.1"
    with refused(dropout):
        model.train()(**base)
    model.eval()(**base)
    with refused(dropout, theirs_of_call):
        model.train(first)(**base)
    mistral = enabled(plain("Mistral"), sp)
    mistral.config.sliding_window = 0 if first else 7
    window = "sliding_window, of the configuration, must be at least 1 or None, got 0"
    with refused(window, theirs_of_call):
        mistral(**base)
    eager, own_config, plain_layer = (enabled(plain("Llama"), sp) for _ in range(3))
    if first:  # after enable
        other = copy.deepcopy(plain("Llama"))
        eager.config._attn_implementation = "eager"
        own_config.model.layers[0].self_attn.config = other.config
        plain_layer.model.layers[1] = other.model.layers[1]
    asks = "the configuration of a Llama{} asks for '{}' attention"
    with refused(asks.format("ForCausalLM", "eager"), forward):
        eager(**base)
    for model in (own_config, plain_layer):
        with refused(asks.format("Attention", "sdpa"), forward):
            model(**base)


def test_what_is_wrong_is_refused_on_all_ranks():
    run_ranks(2, check_refusals)


def trained(
    rank: int, sp: SequenceParallel, sharded: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of this rank's reader and the gradients under DDP or FSDP2, where layers are
    checkpointed in one of two ways.
    """
    model = enabled(plain("Qwen2, windows above"), sp).train()
    call = calls()[("whole", "documents")[rank // sp.size]]
    model.gradient_checkpointing_enable({"use_reentrant": not sharded})
    if sharded:
        for module in (*model.model.layers, model):
            fully_shard(module)
        wrapped = model
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    model.zero_grad()
    loss = wrapped(**call).loss
    loss.backward()
    grads = {
        name: p.grad.full_tensor() if sharded else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return float(loss.detach()), grads


def trained_in_each_way(rank: int) -> list[tuple]:
    """By pairs under DDP, by all ranks under DDP, and by pairs under FSDP2."""
    pairs, all_ranks = init_sequence_parallel(sp_size=2), init_sequence_parallel()
    return [trained(rank, *way) for way in ((pairs, False), (all_ranks, False), (pairs, True))]


def test_ranks_that_share_sequences_are_one_process_to_what_averages():
    """DDP and FSDP2. Two readers of two ranks each, and one of four: the mean over ranks of the
    readers' gradients.
    """
    model = plain("Qwen2, windows above")
    one, other = (expected_results(model, calls()[name]) for name in ("whole", "documents"))
    both = {name: (one[name] + other[name]) / 2 for name, _ in model.named_parameters()}
    for rank, found in enumerate(run_ranks(4, trained_in_each_way)):
        of_reader = (one, other)[rank // 2]
        expected = (of_reader, both), (one, one), (of_reader, both)
        for (loss, grads), (reader, mean) in zip(found, expected, strict=True):
            assert loss == pytest.approx(float(reader["loss"]), rel=BOUND)
            for name, grad in grads.items():
                assert relative_error(grad, mean[name]) < BOUND, name


@pytest.mark.parametrize(("script", "bound"), [("transformers", 1e-5), ("trainer", 1e-3)])
def test_a_few_lines_make_a_script_sequence_parallel(script, bound):
    """One process with whole sequences, and two with a half of each. A Trainer prints 4 digits."""
    curves = []
    for size, name in ((1, "before"), (2, "after")):
        code, printed = run_script(size, f"examples/{script}_{name}.py")
        assert code == 0, printed[-3000:]
        losses = re.findall(r"\bloss(?:': ')? ?([\d.]+)", printed)
        # some versions of transformers print those of each process
        curves.append([float(loss) for loss in losses[:: max(len(losses) // 10, 1)]])
    before, after = curves
    assert len(before) == 10
    assert before[-1] < 0.9 * before[0]
    assert after == pytest.approx(before, rel=bound)
    sources = [(ROOT / f"examples/{script}_{name}.py").read_text() for name in ("before", "after")]
    lines = [set(source[source.index("import ") :].splitlines()) for source in sources]
    assert len(lines[1] - lines[0]) <= 5
