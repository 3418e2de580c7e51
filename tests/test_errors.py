"""Errors about other ranks: their builtin classes, and their way to another process."""

import multiprocessing
import pickle

import pytest

from bmt_burst import errors

BUILTINS = {
    errors.RanksDisagree: (ValueError,),
    errors.RankFailed: (RuntimeError,),
    errors.RankGone: (RuntimeError,),
    errors.RankLate: (errors.RankGone, RuntimeError, TimeoutError),
}


def raise_error(name: str) -> None:
    raise getattr(errors, name)("rank 1 of the group, in call 2")


def test_every_error_subclasses_a_builtin_one():
    assert {x.__name__ for x in BUILTINS} == set(errors.__all__)
    for error, builtins in BUILTINS.items():
        assert issubclass(error, builtins)
        assert sum(issubclass(error, kind) for kind in (ValueError, RuntimeError)) == 1


def test_errors_survive_the_way_between_processes():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for error in BUILTINS:
            with pytest.raises(error, match="rank 1 of the group, in call 2") as caught:
                pool.apply(raise_error, (error.__name__,))
            assert type(caught.value) is error
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                copied = pickle.loads(pickle.dumps(caught.value, protocol))
                assert (type(copied), str(copied)) == (error, str(caught.value))
