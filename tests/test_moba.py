"""MoBA, an extension outside of the library, in configurations and models.

tests/conformance/test_extensions.py compares its attention with its definition.
"""

from bmt_burst.extensions import read_extension
from examples.moba import MoBA, main
from models.config import CPMConfig
from tests.refusals import refusal

SMALL = MoBA(block_size=4, topk=2)


def test_a_configuration_names_it():
    values = {"kind": "moba", "block_size": 4, "topk": 2}
    config = CPMConfig(64, 32, 64, 2, 4, 2, 8, sparse=values)
    assert CPMConfig.from_dict(config.to_dict()) == config
    assert config.sparse == SMALL
    with refusal(r"ValueError: unknown kind 'mob': expected one of \['infllm-v2', 'moba'"):
        read_extension({"kind": "mob"})


def test_the_example_trains_and_generates(capsys):
    main(6)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("loss of a token: ")
    before, after = (float(x) for x in (first.split()[4], first.split()[6]))
    assert after < before
    assert len(second.split()) == 9
