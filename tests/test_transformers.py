"""Models of transformers over ranks: logits, losses and gradients are those of the plain model, and
what is refused.

Ranks are simulated, but for those of torch.distributed, which are processes.
"""

import copy
import functools
import pickle
import re

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
CONFIGS = {  # by family and what is special: what it has besides SIZES
    "Llama": {},
    "Llama, rotary by length": {"rope_parameters": DYNAMIC, "max_position_embeddings": 30},
    "Mistral": {"sliding_window": 7, "head_dim": 16},
    "Qwen2, windows above": {**WINDOWS, "num_hidden_layers": 3, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Qwen3, windows between": {**WINDOWS, **BETWEEN},
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
    "GptOss": {"sliding_window": 9, "head_dim": 8, **EXPERTS},
}
if not hasattr(hf, "MiniCPM3Config"):  # before transformers 5.2x
    del CONFIGS["MiniCPM3"]


@functools.cache
def plain(name: str) -> hf.PreTrainedModel:
    family = name.partition(",")[0]
    config = getattr(hf, f"{family}Config")(**{**SIZES, **CONFIGS[name]})
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
    padding = torch.arange(37) < torch.tensor([[37], [20]])
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
        "padding": {
            "input_ids": whole.where(padding, 0),
            "labels": whole.masked_fill(~padding, -100),
            "attention_mask": padding.long(),
        },
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


def test_documents_may_be_balanced():
    """Those of a batch, whose layout a rank does not know before; so the order of logits is that of
    the documents.
    """
    call = calls()["documents"]
    layout = Layout.balanced(Mask.documents((0, 13, 33, 37)), 3)
    assert layout != Layout.zigzag(37, 3)
    expected = expected_results(plain("Mistral"), call)

    def work(ring):
        model = enabled(
            plain("Mistral"), SequenceParallel(ring.rank, 3, process_group=ring), balanced=True
        )
        rows = model(**calls()["documents of rows"])
        return rows.loss, model(**call).logits

    found = simulate(3, work)
    logits = layout.unshard([logits for _, logits in found])
    assert relative_error(logits, expected["logits"]) < BOUND
    of_rows = expected_results(plain("Mistral"), calls()["documents of rows"])
    assert relative_error(found[0][0], of_rows["loss"]) < BOUND


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
    model = plain("Mistral")
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
        (gpt2, f"TypeError: {known} GPT2LMHeadModel: call burst_attn_func in the attention of"),
        (inside, f"TypeError: {known} ModuleDict: pass its lm, a LlamaForCausalLM"),
        (other_forward, f"TypeError: this OtherForward {other}ForCausalLM"),
        (other_attention, f"TypeError: {layer} MistralAttention, {other}Attention"),
        (own_forward, f"TypeError: {layer} LlamaAttention, {other}Attention"),
        (other_loss, "ValueError: this LlamaForCausalLM has another loss than transformers'"),
        (enabled(llama, SequenceParallel()), "ValueError: .* is already enabled, for 1 ranks"),
    ):
        with refusal(message):
            enable(model, SequenceParallel())


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
        (documents, "documents", "position_ids start again, but transformers does not"),
        (both, "whole", "use_bidirectional_attention is True in the configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            over_ranks(model, calls()[call], 2)


def test_options_and_enabled_parts_are_checked():
    ours = enabled(plain("Llama"), SequenceParallel())
    ids, alone = tokens(1, 5), "was called without its model: call the model that was enabled"
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
ONE_SOURCE = "expected either input_ids or inputs_embeds, got "
REFUSED = [  # what is wrong on all ranks, and how its error begins
    ({"use_cache": True}, "use_cache and past_key_values need whole sequences"),
    ({"output_attentions": True}, "output_attentions: attention over ranks never"),
    ({"logits_to_keep": 1}, "logits_to_keep counts tokens of whole sequences"),
    ({"cu_seq_lens_q": IDS}, "cu_seq_lens_q: cannot cut an unknown argument over ranks"),
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
        "attention_mask must be of whole sequences, (2, 37), ",
    ),
    (
        {"position_ids": torch.zeros(3, 1, 37, dtype=torch.int64)},
        "position_ids must be of whole sequences, (2, 37) or (1, 37), got shape (3, 1, 37): "
        "positions of several axes, as of multimodal models, are not supported",
    ),
    ({"attention_mask": OF_ROWS.gt(3)}, "attention_mask has padding before other tok"),
    ({"attention_mask": OF_ROWS.lt(30)}, "labels must be -100 where attention_mask is 0"),
    (
        {"attention_mask": torch.ones(2, 37), "position_ids": packed(30, 7)},
        "position_ids start again where attention_mask has no padding",
    ),
]
WHOLE = "(whole, identical on every rank)"
LONGER = {"input_ids": tokens(2, 38), "labels": tokens(2, 38)}
DIFFER = [  # what rank 0 alone is given
    ({"input_ids": IDS % 63}, f"ranks differ in input_ids {WHOLE}: rank 0 has"),
    (LONGER, f"ranks differ in input_ids {WHOLE}"),
    ({"position_ids": packed(30, 7)}, "ranks differ in arguments: rank 0 has ['input_ids', 'lab"),
    ({"num_items_in_batch": 7}, f"ranks differ in num_items_in_batch {WHOLE}"),
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
    with refused(f"ranks differ in inputs_embeds {WHOLE}: rank 0 has '(2"):
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


def test_a_few_lines_make_a_script_sequence_parallel():
    """One process with whole sequences, and two with a half of each."""
    curves = []
    for size, name in ((1, "before"), (2, "after")):
        code, printed = run_script(size, f"train/examples/transformers_{name}.py")
        assert code == 0, printed[-3000:]
        curves.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)])
    before, after = curves
    assert len(before) == 10
    assert before[-1] < 0.9 * before[0]
    assert after == pytest.approx(before, rel=1e-5)
    sources = [
        (ROOT / f"train/examples/transformers_{name}.py").read_text()
        for name in ("before", "after")
    ]
    lines = [set(source[source.index("import ") :].splitlines()) for source in sources]
    assert len(lines[1] - lines[0]) <= 5
