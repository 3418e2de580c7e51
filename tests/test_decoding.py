"""CPM-Bee and CPM-Ant continue rows as their whole forward does, token for token."""

import pytest
import torch

from bmt_burst import Cache, SequenceParallel, simulate
from models.cpm_ant import ant_scores
from tests.live import Golden, bee_instance, golden
from tests.reference import relative_error
from tests.refusals import refusal
from train.cpm_live.generate import AntDecoder, BeeDecoder, continue_row
from train.generation.decoding import Sampling

FP32 = 1e-5  # as in test_cpm_live.py
START, END = 6, 7


def ant_row(case: Golden) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt of type 0 and text of type 2."""
    tokens = torch.cat((torch.arange(16, 24), torch.arange(30, 47)))
    return tokens, torch.tensor([0] * 8 + [2] * 17)


def test_a_bee_answers_with_the_golden_logits():
    """Answers that stand anywhere in the golden row come last here: what they see, and how far, is
    the same.
    """
    case, (row, hidden) = golden("bee"), bee_instance()
    shown = (case.input["span"][0] == 0) & ~case.input["context"][0]
    expected = case.tensors["logits_f64"][0][shown]
    decoder = BeeDecoder(case.model(), row, len(row["input"]) + len(hidden))
    found, before = [], None
    for segment, token in hidden:
        if segment != before:
            assert token == START
            decoder.begin(segment, token)
        else:
            decoder.append(token)
        found.append(decoder.logits)
        before = segment
    assert len({segment for segment, _ in hidden}) > 1
    assert relative_error(torch.stack(found), expected) < FP32


def test_an_ant_continues_as_the_whole_forward_says():
    """What is added is not context, and sees all before it."""
    case = golden("ant")
    model, (tokens, segments) = case.model(), ant_row(case)
    decoder = AntDecoder(model, tokens, segments, 40)
    added, found = [50, 3, 119, 77], [decoder.logits]
    for token in added:
        decoder.append(token)
        found.append(decoder.logits)
    tokens = torch.cat((tokens, torch.tensor(added)))
    segments = torch.cat((segments, torch.full((4,), 2)))
    at = torch.arange(len(tokens))
    scores = ant_scores(case.config, len(tokens), at < 25, segments, torch.zeros_like(at))
    whole = model(tokens[None], segments[None], at, scores)[0, 24:]
    assert relative_error(torch.stack(found), whole) < FP32


def test_continuing_ends_where_it_should():
    case, greedy = golden("ant"), Sampling(temperature=0)

    def continued(tokens, end=END, sampling=greedy):
        decoder = AntDecoder(case.model(), *ant_row(case), 60)
        return continue_row(decoder, tokens, end, sampling.on("cpu"), torch.tensor(True))

    five = continued(5)
    assert five == continued(5)
    assert five[:3] == continued(3)
    assert continued(5, end=five[0]) == []
    samples = [continued(8, sampling=Sampling(1.5, 20, 0.9, seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_a_bee_may_answer_with_extended_tokens():
    case, (row, _) = golden("bee"), bee_instance()
    decoder = BeeDecoder(case.model(), row, 96)
    assert decoder.token(119) == (119, 0)
    assert decoder.token(121) == (int(row["ext_table_ids"][1]), int(row["ext_table_sub"][1]))
    decoder.begin(4, START)
    plain = decoder.logits
    assert plain.shape == (122,)
    decoder.append(121)
    extended = decoder.logits
    again = BeeDecoder(case.model(), row, 96)
    again.begin(4, START)
    again.append(decoder.token(121)[0])  # without its sub-id
    assert not torch.allclose(extended, again.logits, rtol=1e-3)


def test_what_cannot_be_continued_is_refused():
    case = golden("bee")
    with pytest.raises(ValueError, match="temperature must be finite"):
        Sampling(temperature=-1.0)

    def work(ring):
        model = case.model(sp=SequenceParallel(ring.rank, 2, process_group=ring))
        fields = case.arguments(case.layouts("zigzag", 2), ring.rank)
        model(*fields, case.scores(), cache=Cache(model.sp, case.config.num_layers, 96))

    with pytest.raises(ValueError, match="expected a Cache of one rank, got one of 2"):
        simulate(2, work)


@pytest.mark.parametrize("tokens", [2**40, 2**60])
def test_more_tokens_than_memory_are_refused(tokens):
    """More than a machine has, and more than an address can hold."""
    case, (row, _), ant = golden("bee"), bee_instance(), golden("ant")
    for decode in (
        lambda: BeeDecoder(case.model(), row, tokens),
        lambda: AntDecoder(ant.model(), *ant_row(ant), tokens),
    ):
        with refusal(f"ValueError: not enough memory for the keys and values of {tokens:,} tokens"):
            decode()
