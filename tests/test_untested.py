"""Models outside the list: which ones are accepted, and what is refused before they are changed.

Ranks are simulated, but for those of one test, which are processes.
"""

import copy
import re
import threading

import pytest
import torch
import transformers as hf
from torch import nn

from bmt_burst import Layout, SequenceParallel, init_sequence_parallel, simulate
from bmt_burst.adapters.transformers import attention, enable, supported, untested
from bmt_burst.adapters.transformers.supported import find_target
from bmt_burst.adapters.transformers.untested import compare_with_plain
from bmt_burst.ranks.sequence_parallel import WholeSequence
from tests import test_transformers
from tests.launcher import run_ranks
from tests.reference import relative_error
from tests.rings import on_ranks

OPTIONS = {"flash": "auto", "deterministic": False, "strategy": "auto"}
SIZES = test_transformers.SIZES | {"vocab_size": 160, "num_hidden_layers": 4, "pad_token_id": 150}
del SIZES["initializer_range"]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS["moe_intermediate_size"] = 40
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
DEEPSEEK = {**MLA, **GROUPS, "v_head_dim": 12, "num_key_value_heads": 4}
DEEPSEEK["moe_intermediate_size"] = 16
WINDOWS = {"use_sliding_window": True, "sliding_window": 4096}
FAMILIES = {  # what it has besides SIZES, and the numbers of the layers that its copy has
    "Arcee": ({}, [0]),
    "Cohere2": ({"head_dim": 8, "num_hidden_layers": 8}, [0, 3]),
    "DeepseekV3": ({**DEEPSEEK, "first_k_dense_replace": 1}, [0, 1]),
    "DeepseekV3, more dense layers": ({**DEEPSEEK, "first_k_dense_replace": 2}, [0, 1, 2]),
    "Gemma3": ({"head_dim": 8, "num_hidden_layers": 7, "sliding_window": 512}, [0, 5]),
    "Glm4": ({"head_dim": 8}, [0]),
    "GPT2": ({}, [0]),
    "Granite": ({}, [0]),
    "Ministral": ({"head_dim": 8, "sliding_window": 4096}, [0]),
    "Mixtral": (EXPERTS, [0]),
    "Olmo2": ({}, [0]),
    "Qwen2, windows above": ({**WINDOWS, "max_window_layers": 3}, [0, 3]),
    "Qwen3Moe": ({**EXPERTS, "head_dim": 8, "decoder_sparse_step": 3}, [0, 1, 2]),
    "SmolLM3": ({}, [0, 3]),
    "Starcoder2": ({"sliding_window": 4096}, [0]),
}


def family(name: str) -> type[hf.PreTrainedModel]:
    """Return the class of a model, or skip the test."""
    short = name.partition(",")[0]
    names = (f"{short}ForCausalLM", f"{short}LMHeadModel")
    found = [getattr(hf, name) for name in names if hasattr(hf, name)]
    return found[0] if found else pytest.skip(f"this transformers has no {short}")


def make(name: str, device: str = "cpu", **more) -> hf.PreTrainedModel:
    own = family(name)
    config = own.config_class(**{**SIZES, **FAMILIES.get(name, ({}, []))[0], **more})
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return own(config)


def compare(model: hf.PreTrainedModel, size: int = 2, balanced: bool = False) -> None:
    def work(sp):
        compare_with_plain(find_target(model, True), sp, balanced, OPTIONS)

    on_ranks(size, work)


def refusals(model: hf.PreTrainedModel, size: int = 2) -> list[str]:
    """Return the texts of the errors of enable, from each rank."""

    def work(sp):
        with pytest.raises(TypeError) as refused:
            enable(model, sp, untested=True)
        return str(refused.value)

    return on_ranks(size, work)


@pytest.fixture
def copies(monkeypatch) -> list[hf.PreTrainedModel]:
    """The copies that are enabled in a test."""
    found, change = [], untested.change_model

    def record(model, *others):
        found.append(model)
        return change(model, *others)

    monkeypatch.setattr(untested, "change_model", record)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_accepted_without_their_weights(name, copies):
    model = make(name, "meta")
    before = torch.get_rng_state()
    compare(model)
    assert torch.equal(torch.get_rng_state(), before)
    ours, kept = copies[0].base_model, FAMILIES[name][1]
    sizes, config = ours.config, model.config
    assert sizes.num_hidden_layers == len(kept)
    for kinds in ("layer_types", "no_rope_layers"):
        if theirs := getattr(config, kinds, None):
            assert getattr(sizes, kinds) == [theirs[number] for number in kept]
    if getattr(config, "sliding_window", None):
        assert sizes.sliding_window == 7
    assert sizes.vocab_size == 128 and {p.dtype for p in ours.parameters()} == {torch.float32}
    assert sizes.hidden_size == config.hidden_size == 32


@pytest.mark.parametrize("name", ["Cohere2", "GPT2"])
def test_accepted_models_equal_the_plain_one(name):
    """Copies are compared as the ranks' layout and options say, and then the model is enabled."""
    model, ids = make(name).eval(), torch.arange(1, 61).unsqueeze(0)
    places = torch.cat((torch.arange(41), torch.arange(19))).unsqueeze(0)
    call = {"input_ids": ids, "labels": ids, "position_ids": places}
    expected = model(**call, use_cache=False)

    def work(ring):
        sp = SequenceParallel(ring.rank, 2, Layout.contiguous(60, 2), process_group=ring)
        ours = enable(copy.deepcopy(model), sp, untested=True, strategy="ulysses")
        out = ours(**call, whole_outputs=True)
        return out.loss, out.logits

    for loss, logits in simulate(2, work):
        assert relative_error(loss, expected.loss) < 1e-5
        assert relative_error(logits, expected.logits) < 1e-5


def enable_over_processes(rank: int) -> str:
    """Enable one model over two ranks, and return the error of another one."""
    sp, model = init_sequence_parallel(), make("Granite").eval()
    ids = torch.arange(1, 61).unsqueeze(0)
    expected = model(ids, use_cache=False).logits
    ours = enable(model, sp, untested=True)
    assert relative_error(ours(ids, whole_outputs=True).logits, expected) < 1e-5
    with pytest.raises(TypeError) as refused:
        enable(make("Bloom"), sp, untested=True)
    return str(refused.value)


def test_processes_come_to_the_same_verdict():
    first, second = run_ranks(2, enable_over_processes)
    assert first == second and "a BloomForCausalLM over 2 ranks does not equal" in first


def test_models_without_a_head_are_compared_by_their_hidden_states(copies):
    config = make("Olmo2", "meta").config
    with torch.device("meta"):
        base, classifier = hf.Olmo2Model(config), hf.Olmo2ForSequenceClassification(config)
    compare(base, 1)
    compare(classifier, 3, balanced=True)
    assert {type(x).__name__ for x in copies} == {"Olmo2Model"}


def test_the_callers_settings_do_not_matter_and_are_kept():
    """Weights in bf16 on a default device, products of less than fp32, no gradients, autocast."""
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make("Olmo2")
        for p in model.parameters():
            p.data.fill_(torch.nan)
        with torch.device("meta"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            compare(model.train().requires_grad_(False), 1)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_default_dtype() == torch.bfloat16 and model.training
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def mix_neighbours(monkeypatch):
    """Let attention read each token's neighbour in memory, as a convolution does."""
    own = hf.models.olmo2.modeling_olmo2.Olmo2Attention.forward

    def forward(self, hidden_states, *args, **named):
        return own(self, hidden_states + 0.01 * hidden_states.roll(1, 1), *args, **named)

    monkeypatch.setattr(hf.models.olmo2.modeling_olmo2.Olmo2Attention, "forward", forward)


def forget_windows(monkeypatch):
    own = attention.SoftmaxAttention
    without = lambda *args, window=None, **named: own(*args, **named)  # noqa: E731
    monkeypatch.setattr(attention, "SoftmaxAttention", without)


def forget_gradients(monkeypatch):
    """Stop the gradient of values. The logits stay right."""
    own = WholeSequence.mix

    def mix(self, layer, kind, q, k, v, *tensors):
        return own(self, layer, kind, q, k, v.detach(), *tensors)

    monkeypatch.setattr(WholeSequence, "mix", mix)


def return_nan(monkeypatch):
    own = WholeSequence.mix
    monkeypatch.setattr(WholeSequence, "mix", lambda *args: own(*args) * torch.nan)


def forget_linear_attention(monkeypatch):
    monkeypatch.setattr(supported, "_check_layers", lambda _: None)


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "head_dim": 16, **EXPERTS}
LINEAR["shared_expert_intermediate_size"] = 16
NUMBER = r"(\d\.\de[+-]\d\d|nan)"


@pytest.mark.parametrize(
    ("name", "more", "fault"),
    [
        ("Olmo2", {}, mix_neighbours),
        ("Olmo2", {}, forget_gradients),
        ("Olmo2", {}, return_nan),
        ("Cohere2", {"head_dim": 8}, forget_windows),
        ("Qwen3Next", LINEAR, forget_linear_attention),
        ("Bloom", {}, lambda _: None),  # its attention adds a bias that ours does not know
    ],
)
def test_wrong_models_are_refused_on_all_ranks_and_not_changed(name, more, fault, monkeypatch):
    model = make(name, **more)
    fault(monkeypatch)
    parts = [(id(part), type(part), id(vars(part).get("config"))) for part in model.modules()]
    attributes = [*vars(model)]
    first, second = refusals(model)
    assert first == second
    texts = re.fullmatch(
        f"a {type(model).__name__} over 2 ranks does not equal the plain one: rows: logits differ "
        f"by {NUMBER}, gradients by {NUMBER} of the largest value; packed rows: logits differ by "
        f"{NUMBER}, gradients by {NUMBER} of the largest value, and at most 1e-04 is expected; "
        "train it without sequence parallelism, or call burst_attn_func in its attention",
        first,
    )
    assert texts, first
    logits = float(texts[1])
    assert (logits < 1e-5) if fault is forget_gradients else not logits < 1e-3
    assert parts == [(id(x), type(x), id(vars(x).get("config"))) for x in model.modules()]
    assert attributes == [*vars(model)]


def test_models_that_do_not_keep_documents_apart_are_refused():
    [text] = refusals(make("OPT", "meta", word_embed_proj_dim=32), 1)
    assert "plain one: packed rows: logits differ by" in text


def test_errors_inside_of_a_copy_are_raised_on_all_ranks(monkeypatch):
    """Also those of one rank alone."""
    own = hf.models.olmo2.modeling_olmo2.Olmo2MLP.forward
    rank = threading.local()

    def forward(self, x):
        if rank.number and x.shape[1] < 40:  # a part of a row
            raise RuntimeError("this rank is too warm")
        return own(self, x)

    monkeypatch.setattr(hf.models.olmo2.modeling_olmo2.Olmo2MLP, "forward", forward)
    model = make("Olmo2", "meta")

    def work(ring):
        rank.number = ring.rank
        with pytest.raises(TypeError) as refused:
            enable(model, SequenceParallel(ring.rank, 2, process_group=ring), untested=True)
        return f"{type(refused.value.__cause__).__name__}: {refused.value}"

    start = "a Olmo2ForCausalLM over 2 ranks could not be compared with the plain one: "
    first, second = simulate(2, work)
    assert second.startswith(f"RuntimeError: {start}this rank is too warm; train it without")
    assert first.startswith(f"RanksDisagree: {start}rank 1 of the group failed before the compari")
    assert "RuntimeError: this rank is too warm" in first
    rank.number = 0
    assert "a StableLmAttention was called without its model" in refusals(make("StableLm"), 1)[0]


class OwnSizes(hf.Olmo2ForCausalLM):
    """A model that cannot be made from a configuration alone."""

    def __init__(self, config, more):
        super().__init__(config)
        self.more = nn.Linear(more, more)


def test_models_that_cannot_be_copied_are_refused():
    [text] = refusals(OwnSizes(make("Olmo2", "meta").config, 3), 1)
    assert "missing 1 required positional argument: 'more'" in text
