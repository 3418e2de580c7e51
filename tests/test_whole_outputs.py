"""Outputs of whole sequences: whole_outputs, TRL's fused head, and models without a head below any
head. On every rank their numbers and gradients are those of the plain model.

Ranks are simulated.
"""

import copy
import inspect
import json
import pickle
import types
import warnings

import pytest
import torch
import transformers as hf

pytest.importorskip("trl")  # a machine with GPUs may lack it

from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.other import extract_model_from_parallel
from torch import Tensor
from transformers.utils import ModelOutput
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from bmt_burst import Mask, SequenceParallel, simulate
from bmt_burst.adapters.transformers import ATTENTION, enable, requests
from bmt_burst.adapters.transformers.requests import WantedOutputs, ask_models
from tests.reference import relative_error
from tests.refusals import refusal
from tests.rings import on_ranks
from tests.test_transformers import (
    BOUND,
    SIZES,
    calls,
    enabled,
    expected_results,
    packed,
    padded,
    plain,
    tokens,
)

HALF = 0.03  # a few of bf16's 2^-8


def tensors_of(out: ModelOutput) -> dict[str, Tensor]:
    """The tensors of an output, by name."""
    found = {}
    for name, x in out.items():
        found |= {f"{name} {i}": y for i, y in enumerate(x)} if isinstance(x, tuple) else {name: x}
    return {name: x for name, x in found.items() if x is not None}


def without(padding: Tensor | None, x: Tensor) -> Tensor:
    """`x` with 0 in the place of `padding` (B, S), if it has numbers of each token."""
    if padding is None or padding.shape != x.shape[:2]:
        return x
    return x.masked_fill(padding.view(*padding.shape, *[1] * (x.dim() - 2)), 0)


def undefined(model: hf.PreTrainedModel, call: dict) -> Tensor | None:
    """The padding whose outputs are not those of the plain model, (B, S), True where it is.

    Under transformers' masks it sees no token, and its attentions differ. TRL's fused head has no
    outputs for padding.
    """
    if "attention_mask" not in call:
        return None
    real, places = call["attention_mask"].bool(), torch.arange(call["attention_mask"].shape[1])
    if "fused_lm_head" in call:
        return ~real
    last = places.where(real, -1000).cummax(1).values
    window = getattr(model.config, "sliding_window", None) or 1000
    return places - last >= window


def loss_of(out: ModelOutput, padding: Tensor | None) -> Tensor:
    """A loss with another gradient for each number of `out` that has one, but for `padding`."""
    total = torch.zeros(())
    for x in tensors_of(out).values():
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()))
            total = total + (without(padding, x).sin() * weights).mean()
    return total


def numbers(model: hf.PreTrainedModel, out: ModelOutput, loss: Tensor, padding: Tensor | None):
    """What an output has, and the gradient of each parameter."""
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: without(padding, x).detach() for name, x in tensors_of(out).items()} | grads


def check_whole(
    model: hf.PreTrainedModel,
    call: dict,
    size: int,
    change=enabled,
    layout: str = "zigzag",
    bound: float = BOUND,
    **options,
) -> None:
    """Check that outputs of all ranks, and gradients, are those of the plain model.

    change   returns an enabled copy
    options  of enable; whole_outputs is of the call
    """
    padding = undefined(model, call)
    whole = {"whole_outputs": True} if options.pop("whole_outputs", False) else {}

    def work(ring):
        sp = SequenceParallel(ring.rank, size, layout, process_group=ring)
        out = change(model, sp, **options)(**call, **whole)
        return out, loss_of(out, padding)

    # with a cache transformers does not tell documents apart; TRL's head has none
    cache = {} if "fused_lm_head" in call else {"use_cache": False}
    out = model(**call, **cache)
    expected = numbers(model, out, loss_of(out, padding), padding)
    found = simulate(size, work)
    got = numbers(model, found[0][0], torch.stack([loss for _, loss in found]).mean(), padding)
    for theirs, _ in found[1:]:
        for name, x in tensors_of(theirs).items():
            assert torch.equal(without(padding, x), got[name]), name
    assert [*got] == [*expected] and type(found[0][0]) is type(out)
    # an FSDP2 that wraps it loses gradients of views that change in place
    assert not any(x._is_view() for x in tensors_of(found[0][0]).values())
    for name, x in expected.items():
        assert (got[name].shape, got[name].dtype) == (x.shape, x.dtype), name
        assert relative_error(got[name].float(), x.float()) < bound, name


@pytest.mark.parametrize(
    ("name", "kind", "size", "options"),
    [
        ("Llama", "whole", 2, {"layout": "contiguous"}),
        ("Llama, rotary by length", "later positions", 3, {}),
        ("Mistral", "documents of rows", 3, {"balanced": True}),
        ("Qwen3Moe", "documents", 2, {"balanced": True}),
        ("Gemma3", "padding", 2, {"layout": "striped"}),
        ("Gemma2", "padding", 3, {"balanced": True}),
        ("Llama, rotary by length", "padding and positions", 3, {"balanced": True}),
        ("GptOss", "padding and positions", 2, {"strategy": "ulysses"}),
    ],
)
def test_whole_outputs_equal_the_plain_ones(name, kind, size, options):
    """Those of padding, too, which sees the row before it."""
    of_padding = calls()["padding"]
    # positions of padding as generation gives them
    places = (torch.arange(37) + 3).where(of_padding["attention_mask"].eq(1), 1)
    kinds = {**calls(), "padding and positions": {**of_padding, "position_ids": places}}
    call = {**kinds[kind], "output_hidden_states": True}
    check_whole(plain(name), call, size, **options, whole_outputs=True)
    del call["labels"]
    check_whole(plain(name), call, size, **options, whole_outputs=True)


def test_embeddings_from_outside_have_their_gradient():
    model, ids = plain("Llama"), tokens(2, 37)
    embeddings = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def work(sp):
        ours = enabled(model, sp, balanced=True)
        return loss_of(ours(inputs_embeds=embeddings, labels=ids, whole_outputs=True), None)

    [got] = torch.autograd.grad(torch.stack(on_ranks(3, work)).mean(), embeddings)
    loss = loss_of(model(inputs_embeds=embeddings, labels=ids, use_cache=False), None)
    [expected] = torch.autograd.grad(loss, embeddings)
    assert relative_error(got, expected) < BOUND


def test_whole_tuples_stay_tuples():
    call = {**calls()["documents of rows"], "output_hidden_states": True, "return_dict": False}
    loss, logits, states = plain("Llama")(**call, use_cache=False)

    def work(sp):
        of_head = enabled(plain("Llama"), sp, balanced=True)(**call, whole_outputs=True)
        states = {name: x for name, x in call.items() if name != "labels"}
        return *of_head, *enabled(plain("Llama").model, sp)(**states)

    got_loss, got_logits, got_states, last, states_of_base = on_ranks(2, work)[1]
    expected = loss, logits, *states, states[-1], *states
    got = got_loss, got_logits, *got_states, last, *states_of_base
    for mine, x in zip(got, expected, strict=True):
        assert relative_error(mine, x) < BOUND


def test_arguments_of_a_call_come_before_requests():
    call = calls()["whole"]
    alone = {"input_ids": call["input_ids"]}  # there is no loss
    for asked, arguments, length in (
        (None, call, 18),
        (WantedOutputs.LOSS_ONLY, call, None),
        (WantedOutputs.LOSS_ONLY, alone, 18),
        (WantedOutputs.LOSS_ONLY, {**call, "whole_outputs": False}, 18),
        (WantedOutputs.LOSS_ONLY, {**call, "whole_outputs": True}, 37),
        (WantedOutputs.WHOLE, call, 37),
        (WantedOutputs.WHOLE, {**call, "whole_outputs": False}, 18),
        (WantedOutputs.WHOLE, {**call, "loss_only": True}, None),
        (WantedOutputs.WHOLE_FOR_OTHERS, alone, 37),
    ):

        def work(ring, arguments=arguments):
            sp = SequenceParallel(ring.rank, 2, process_group=ring)
            return enabled(plain("Llama"), sp)(**arguments).logits

        with ask_models(asked), ask_models(None):
            logits = simulate(2, work)[1]
        assert (logits if logits is None else logits.shape[1]) == length


def with_fused_head(name: str, **options) -> hf.PreTrainedModel:
    """Another model with the same parameters and TRL's head."""
    model = plain.__wrapped__(name)
    outputs = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"
    add_fused_lm_head(model, outputs=outputs, **options)
    return model


def fused_calls() -> dict[str, dict]:
    rows, completions = calls()["documents of rows"], padded()
    completions["labels"] = completions["labels"].where(torch.arange(37) > 20, -100)
    collate = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=8)
    ids = tokens(1, 37)[0].tolist()
    shifted = rows["labels"].roll(-1, 1)
    return {
        "whole": calls()["whole"],
        "few targets": calls()["few targets"],
        "no targets": {**calls()["whole"], "labels": torch.full((2, 37), -100)},
        "rows": {**rows, "shift_labels": shifted},
        "shift_labels alone": {
            "input_ids": rows["input_ids"],
            "shift_labels": shifted.where(torch.arange(37) % 3 > 0, -100),
            "position_ids": packed(30, 7),
            "num_items_in_batch": 11,
        },
        "completions": completions,
        "padding-free": collate([{"input_ids": ids[:20]}, {"input_ids": ids[20:]}]),
    }


@pytest.mark.parametrize("kind", fused_calls())
def test_a_fused_head_equals_the_plain_one(kind):
    call = {**fused_calls()[kind], "fused_lm_head": True}
    for name, size, options in (
        ("Llama", 2, {}),
        ("Gemma3", 3, {"balanced": True}),
        ("Gemma2", 2, {"layout": "striped"}),  # which caps its logits
    ):
        check_whole(with_fused_head(name, temperature=0.7), call, size, **options)
    out = enabled(with_fused_head("Llama"), SequenceParallel())(**call)
    fixed = {name for name, x in tensors_of(out).items() if not x.requires_grad}
    assert fixed == {"log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"}
    assert out.log_probs.shape[1] == call["input_ids"].shape[1] - ("shift_labels" not in call)


def test_the_heads_of_a_model_do_not_change_each_other():
    call = calls()["documents of rows"]
    states = {**call, "output_hidden_states": True}
    check_whole(with_fused_head("Llama"), states, 2, balanced=True, whole_outputs=True)
    ours = enable(with_fused_head("Llama"), SequenceParallel())
    add_fused_lm_head(other := copy.deepcopy(plain("Llama")))
    out = enable(other, SequenceParallel())(**call, fused_lm_head=True)
    assert [*out] == ["loss", "log_probs", "label_mask"]
    expected = expected_results(plain("Llama"), call)
    again, read = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    for parameter in ours.parameters():
        parameter.data.zero_()
    for copied in (again, read):
        assert relative_error(copied(**call).loss, expected["loss"]) < BOUND
    assert relative_error(again(**call, fused_lm_head=True).loss, expected["loss"]) < BOUND
    with refusal("ValueError: fused_lm_head: .* call TRL's add_fused_lm_head before enable"):
        read(**call, fused_lm_head=True)  # as pickles of plain models, it has no TRL's head
    with refusal("ValueError: fused_lm_head needs labels or shift_labels, got neither"):
        again(call["input_ids"], fused_lm_head=True)


def prepared(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The model, with autocast as Accelerator.prepare_model has it."""
    model._original_forward = model.forward
    with_autocast = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(with_autocast), model)
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_autocast_of_accelerate_may_come_before_and_after(fused):
    """Both are those of the plain model with autocast."""
    call = {**calls()["documents"], **({"fused_lm_head": True} if fused else {})}
    whole = {} if fused else {"whole_outputs": True}

    def fresh() -> hf.PreTrainedModel:
        model = plain("Llama")
        model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if fused:
            add_fused_lm_head(model)
        return model

    in_fp32 = expected_results(plain("Llama"), calls()["documents"])["loss"]
    for change in (
        lambda _, sp, **options: enable(prepared(fresh()), sp, **options),
        lambda _, sp, **options: prepared(enable(fresh(), sp, **options)),
    ):
        check_whole(prepared(fresh()), call, 2, change, bound=HALF, balanced=True, **whole)
        model = change(None, SequenceParallel())
        loss = model(**call).loss
        assert relative_error(loss, in_fp32) > 10 * BOUND
        assert copy.deepcopy(model)(**call).loss == loss
        extract_model_from_parallel(model, keep_fp32_wrapper=False)  # Accelerator.unwrap_model
        assert relative_error(model(**call).loss, loss) < HALF


def test_a_fused_head_above_another_forward_is_refused():
    """Of another package, or of the model that this one is a copy of."""
    patched = plain.__wrapped__("Llama")
    patched.forward = types.MethodType(lambda self, **named: None, patched)
    add_fused_lm_head(patched)
    for model in (patched, copy.deepcopy(prepared(with_fused_head("Llama")))):
        with refusal("TypeError: this LlamaForCausalLM has another forward than transformers'"):
            enable(model, SequenceParallel())
    enable(prepared(with_fused_head("Llama")), SequenceParallel())
    enable(copy.deepcopy(with_fused_head("Llama")), SequenceParallel())  # calls no other forward


def test_signatures_are_those_of_plain_models():
    """Trainers read them to choose columns."""
    model = enabled(plain("Llama"), SequenceParallel())
    assert inspect.signature(model.forward) == inspect.signature(plain("Llama").forward)


def headed(name: str) -> hf.PreTrainedModel:
    family, _, options = name.partition(", ")
    options = {"sliding_window": 7} if options else {}
    kind = "Mistral" if "Mistral" in family else "Llama"
    config = getattr(hf, f"{kind}Config")(**SIZES, **options, num_labels=3)
    torch.manual_seed(0)
    return getattr(hf, family)(config).eval()  # classifiers of tokens have dropout


CLASSES = {"labels": torch.tensor([0, 2, 1, 2])}
OF_TOKENS = {"labels": (tokens(4, 37) % 3).where(padded()["attention_mask"].eq(1), -100)}
ANSWERS = {
    "start_positions": torch.tensor([2, 12, 4, 0]),
    "end_positions": torch.tensor([9, 30, 4, 36]),
}
PADDED = {name: x for name, x in padded().items() if name != "labels"}


@pytest.mark.parametrize(
    ("name", "call", "size", "options"),
    [
        ("LlamaForSequenceClassification", {**PADDED, **CLASSES}, 2, {}),
        ("MistralForSequenceClassification, windows", {**PADDED, **CLASSES}, 3, {"balanced": True}),
        ("LlamaForTokenClassification", {**PADDED, **OF_TOKENS}, 3, {"layout": "striped"}),
        ("LlamaForTokenClassification", {**PADDED, **OF_TOKENS}, 2, {"balanced": True}),
        ("LlamaForQuestionAnswering", {**PADDED, **ANSWERS}, 2, {"balanced": True}),
        ("LlamaModel", PADDED, 2, {"balanced": True}),
        (
            "MistralModel, windows",
            {
                "input_ids": tokens(2, 37),
                "position_ids": torch.cat((packed(20, 17), packed(5, 1, 31))),
            },
            3,
            {"balanced": True},
        ),
    ],
)
def test_heads_above_whole_hidden_states_equal(name, call, size, options):
    call = {**call, "output_hidden_states": True}
    check_whole(headed(name), call, size, **options)


def test_a_base_alone_serves_the_head_above_it():
    """A causal language model with only its base enabled."""
    model = plain("Llama")

    def change(model, sp, **options):
        model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        enable(model.model, sp, **options)
        return model

    check_whole(model, calls()["documents of rows"], 2, change, balanced=True)


def test_padding_sees_tokens_only_where_its_outputs_are_read():
    """Else it would cost time for nothing. Where it sees nothing, one warning says so."""
    row = {"input_ids": tokens(1, 37), "attention_mask": torch.arange(37)[None] < 20}
    labels = {"labels": row["input_ids"].where(row["attention_mask"], -100)}
    masks = []

    def keep(module, args, named):
        mask = named["bmt_burst"].sequence.mask
        masks.append(mask if isinstance(mask, Mask) else mask[0])

    ours, windows = enabled(plain("Llama"), SequenceParallel()), headed("MistralModel, windows")
    for model in (ours, enable(windows, SequenceParallel())):
        model.base_model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    fused = enable(with_fused_head("Llama"), SequenceParallel())
    fused.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    requests._warned.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours(**row, **labels)
        ours(**row, **labels, loss_only=True)
        fused(**row, **labels, fused_lm_head=True)
        ours(**row, **labels, whole_outputs=True)
        ours(**row)
        windows(**row)
        assert not warned
        left = {**row, "attention_mask": row["attention_mask"].flip(1)}
        for _ in range(2):
            out = ours(**left, whole_outputs=True)
    assert out.logits.shape == (1, 37, 64)
    assert len(warned) == 1 and "some padding sees no token" in str(warned[0].message)
    pairs = 20 * 21 // 2
    more = pairs + 17 * 20
    assert [mask.area for mask in masks] == [pairs] * 3 + [more] * 3 + [pairs] * 2
    # the first token of a second document is a target of the padding before it
    row["attention_mask"] = torch.tensor([[1] * 12 + [0] * 5 + [2] * 20])
    labels = {"labels": row["input_ids"].where(row["attention_mask"].ne(0), -100)}
    alone, with_outputs = (
        ours(**row, **labels, whole_outputs=whole).loss for whole in (False, True)
    )
    assert alone.equal(with_outputs)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaModel"])
def test_copies_pickles_and_what_is_saved_of_heads(name, tmp_path):
    ids, ours = tokens(2, 37), headed(name)
    expected = ours(ids)[0]
    assert enable(ours, SequenceParallel()) is ours
    for again in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert again.base_model.config._attn_implementation == ATTENTION
        assert relative_error(again(ids)[0], expected) < BOUND
        with refusal(f"ValueError: this {name} is already enabled, for 1 ranks"):
            enable(again, SequenceParallel())
    ours.save_pretrained(tmp_path)
    loaded = getattr(hf, name).from_pretrained(tmp_path)
    assert loaded.base_model.config._attn_implementation != ATTENTION
    assert relative_error(loaded(ids)[0], expected) < BOUND
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    with refusal("ValueError: use_cache and past_key_values need whole sequences"):
        ours(ids, use_cache=True)
    ours.base_model._sp = SequenceParallel(0, 2, process_group=object())
    again = pickle.loads(pickle.dumps(ours))
    with pytest.raises(RuntimeError, match=r"Call attach\(sp\) of the layer or model"):
        again(ids)
    again.base_model.attach(SequenceParallel())
    assert relative_error(again(ids)[0], expected) < BOUND
