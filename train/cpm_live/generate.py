"""Generation: CPM-Bee fills in the texts under "<ans>" of an instance, CPM-Ant continues a text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.cpm_ant import CPMAnt
from models.cpm_bee import CPMBee
from train.cpm_live.batches import extended_table
from train.cpm_live.instances import ANSWER, COLUMNS, TASKS, Instance, bee_instance
from train.cpm_live.rows import Row, bee_row
from train.cpm_live.tokenizers import AntTokenizer, BeeTokenizer, SubIds
from train.data.records import BadRecord
from train.generation.decoding import AntDecoder, BeeDecoder, Choose, continue_row


def fill_in(
    model: CPMBee, tokenizer: BeeTokenizer, prompt: str, tokens: int, choose: Choose
) -> str:
    """Return the instance in `prompt`, JSON such as `{"question": "2 + 3", "<ans>": ""}`, answered.

    Each text under "<ans>" is continued by up to `tokens` tokens, which `choose` takes from logits
    (V,). Raises ValueError for other prompts.
    """
    try:
        record = json.loads(prompt)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"the prompt of a CPM-Bee must be an instance as JSON: {error}") from error
    instance, sub_ids = bee_instance(tokenizer, record)
    [blanks] = np.nonzero(instance.segments[:, COLUMNS.kind])
    if not len(blanks):
        raise BadRecord(
            f'there is nothing to fill in: give a text under {ANSWER}, as in {{"{ANSWER}": ""}}'
        )
    row = bee_row(model.config, [instance], len(instance), tokenizer.eos_id)
    decoder = BeeDecoder(model, _context_fields(row), len(instance) + tokens * len(blanks))
    allowed = _allowed_tokens(decoder, tokenizer, sub_ids)
    answers = []
    for segment in blanks.tolist():
        first, *begun = _segment_places(decoder, instance, segment)
        decoder.begin(segment, first)
        for place in begun:
            decoder.append(place)
        found = continue_row(
            decoder,
            tokens,
            tokenizer.eos_id,
            lambda logits: choose(logits.where(allowed, -torch.inf)),
        )
        answers.append(tokenizer.text(map(decoder.token, [*begun, *found]), sub_ids))
    return json.dumps(_put_answers(record, iter(answers)), ensure_ascii=False)


def _context_fields(row: Row) -> dict[str, Tensor]:
    """Return the arguments of BeeDecoder: the tokens that are given, and the extended table."""
    given = row.fields["context"]
    fields = {
        name: x[given]
        for name, x in row.fields.items()
        if x.shape == given.shape and name != "span"
    }
    ext_tokens, ext_subs = extended_table([row])
    return fields | {
        "segment_rel": row.fields["segment_rel"],
        "ext_table_ids": ext_tokens,
        "ext_table_sub": ext_subs,
    }


def _segment_places(decoder: BeeDecoder, instance: Instance, segment: int) -> Iterator[int]:
    """Yield the tokens of a segment by their place in the logits."""
    stop = int(instance.segments[: segment + 1, COLUMNS.tokens].sum())
    for at in range(stop - int(instance.segments[segment, COLUMNS.tokens]), stop):
        yield decoder.place(int(instance.tokens[at]), int(instance.subs[at]))


def _allowed_tokens(decoder: BeeDecoder, tokenizer: BeeTokenizer, sub_ids: SubIds) -> Tensor:
    """Return the tokens that an answer may have, (V,) bool: not those that frame texts."""
    places = len(decoder.logits)
    words = decoder.model.config.vocab_size
    allowed = torch.zeros(places, dtype=torch.bool)
    allowed[: tokenizer.vocab_size] = True
    allowed[[tokenizer.bos_id, tokenizer.root_id, tokenizer.pad_id]] = False
    for place in range(words, places):
        allowed[place] = sub_ids.text(*decoder.token(place)) is not None
    return allowed.to(decoder.logits.device)


def _put_answers(record: Any, answers: Iterator[str]) -> Any:
    """Return the record with these texts under "<ans>", in the order of the texts there."""
    found = copy.deepcopy(record)
    main = found[0] if isinstance(found, list) else found

    def replaced(value: Any) -> Any:
        return (
            {k: replaced(v) for k, v in value.items()} if isinstance(value, dict) else next(answers)
        )

    main[ANSWER] = replaced(main[ANSWER])
    return found


def continue_text(
    model: CPMAnt, tokenizer: AntTokenizer, prompt: str, tokens: int, choose: Choose
) -> str:
    """Return the text `prompt` and up to `tokens` more tokens, as `fill_in` takes them."""
    config, task = model.config, TASKS["lm"]
    text = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    row = torch.tensor(
        [config.prompt_length * task + i for i in range(config.prompt_length)] + text
    )
    segments = torch.tensor([0] * config.prompt_length + [task] * len(text))
    decoder = AntDecoder(model, row, segments, len(row) + tokens)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    texts = [i for i in range(tokenizer.vocab_size) if tokenizer.vocabulary.is_text(i)]
    known[[*texts, tokenizer.eos_id]] = True
    known = known.to(decoder.logits.device)
    found = continue_row(
        decoder, tokens, tokenizer.eos_id, lambda logits: choose(logits.where(known, -torch.inf))
    )
    return prompt + tokenizer.decode(found)
