"""Counts and options in messages."""

import pytest

from train.base.wording import counted, flag


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "token"), "0 tokens"),
        ((1, "token"), "1 token"),
        ((2000, "token"), "2,000 tokens"),
        ((1, "line is bad", "lines are bad"), "1 line is bad"),
        ((2, "line is bad", "lines are bad"), "2 lines are bad"),
    ],
)
def test_one_is_no_several(arguments, text):
    assert counted(*arguments) == text


def test_settings_are_named_as_they_are_typed():
    assert (flag("seq_len"), flag("lr")) == ("--seq-len", "--lr")
