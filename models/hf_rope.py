"""Rotary positions in config.json of Hugging Face's folders, to models/rope.py and back.

transformers 4 has them in rope_theta and rope_scaling, transformers 5 in rope_parameters. A file
that has both must mean the same by both.

OpenBMB's files of MiniCPM and MiniCPM-SALA compute LongRoPE's tables once, for
max_position_embeddings tokens. If that is above the original length, the long divisors hold at
every length. transformers, and this project's code for it, use the short ones up to the original
length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .config import CPMConfig
from .rope import DynamicNTK, Linear, Llama3, LongRope, RopeScaling, Yarn

_PLACES = ("rope_scaling", "rope_parameters")
# Names in rope_scaling and rope_parameters: names that any kind may have, names of each kind, and
# names of other kinds, which transformers ignores.
_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_OF_KIND = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor"}
    | {"mscale", "mscale_all_dim"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
}
_ORIGINAL = "original_max_position_embeddings"
# names of config.json that are read here
ROPE_FIELDS = (*_PLACES, _ORIGINAL, "rope_theta", "partial_rotary_factor")
_NO_MATTER = {_ORIGINAL, "finetuned"}.union(*_OF_KIND.values())


def read_rope(hf: dict[str, Any], computes_once: bool) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of rotary positions in a config.json without its nulls.

    `computes_once` says whether the model's code computes LongRoPE's tables once. Raises ValueError
    for scalings that CPM does not compute, and for contradictions.
    """
    places = {name: _named_values(hf, name) for name in _PLACES if hf.get(name)}
    bases = {"rope_theta": hf.get("rope_theta")}
    bases |= {f"{name}'s rope_theta": place.get("rope_theta") for name, place in places.items()}
    theta = _agreed(bases, 10000.0)
    scalings = {name: _rope_scaling(place, hf) for name, place in places.items()}
    if len(scalings) > 1 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        both = " and ".join(f"{name} {place}" for name, place in places.items())
        raise ValueError(f"{both} contradict each other: remove one of them from config.json")
    scaling = next(iter(scalings.values()), None)
    if computes_once and isinstance(scaling, LongRope):
        is_long = _length(hf, "max_position_embeddings") > scaling.original_length
        short = scaling.long_factor if is_long else scaling.short_factor
        scaling = dataclasses.replace(scaling, short_factor=short)
    return theta, scaling


def partial_factors(hf: dict[str, Any]) -> list[Any]:
    """Return all values of partial_rotary_factor in a config.json."""
    places = [hf, *(_named_values(hf, name) for name in _PLACES)]
    factors = (place.get("partial_rotary_factor") for place in places)
    return [factor for factor in factors if factor is not None]


def _named_values(hf: dict[str, Any], name: str) -> dict[str, Any]:
    rope = hf.get(name, {})
    if not isinstance(rope, dict):
        raise ValueError(f"{name} must hold names and values, got {rope!r}")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"{name} must be the same for all layers, got separate ones for {nested}")
    return rope


def _agreed(said: dict[str, Any], default: Any) -> Any:
    """Return the one value that is not None, or the default. Raises ValueError for several."""
    given = {name: value for name, value in said.items() if value is not None}
    [first, *others] = given.values() or [default]
    if any(other != first for other in others):
        values = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(f"{values} contradict each other: edit config.json")
    return first


def _rope_scaling(rope: dict[str, Any], hf: dict[str, Any]) -> RopeScaling | None:
    """Make the scaling in `rope`, with transformers' defaults and other fields of config.json."""
    kind = _agreed({name: rope.get(name) for name in ("rope_type", "type")}, "default")
    if not isinstance(kind, str) or kind not in ("default", *_OF_KIND):
        known = ", ".join(_OF_KIND)
        raise ValueError(f"rotary positions must be scaled by one of {known}, got {kind!r}: {rope}")
    _check_unknown(kind, rope)
    if kind == "default":
        if rope.get("factor", 1) not in (None, 1):
            raise ValueError(
                f"{rope} has a factor without a kind of scaling: add a rope_type, one of "
                f"{', '.join(_OF_KIND)}, or remove the factor"
            )
        return None
    said = {name: rope[name] for name in _OF_KIND[kind] & rope.keys() if rope[name] is not None}
    if kind == "yarn" and rope.get("truncate", True) is None:  # as transformers reads it
        said["truncate"] = False
    try:
        if kind != "linear":
            said["original_length"] = _original_length(kind, rope, hf)
        if kind in ("yarn", "longrope") and "factor" not in said:
            said["factor"] = _length(hf, "max_position_embeddings") / said["original_length"]
        said = _without_mscale(said) if kind == "yarn" else said
        return _without_default(RopeScaling.from_dict({"kind": kind, **said}))
    except ValueError as error:
        raise ValueError(f"rotary positions are scaled by {kind}: {error}") from error


def _check_unknown(kind: Any, rope: dict[str, Any]) -> None:
    """Raise ValueError for unknown fields that are neither null nor false."""
    names = sorted(rope.keys() - _OF_ALL - _NO_MATTER)
    if unknown := [name for name in names if rope[name] is not None and rope[name] is not False]:
        raise ValueError(
            f"rotary positions of kind {kind!r} have unknown fields {unknown}: if these change "
            "nothing, remove them from config.json"
        )


def _original_length(kind: str, rope: dict[str, Any], hf: dict[str, Any]) -> int:
    places = {} if kind == "dynamic" else {_ORIGINAL: hf, f"the scaling's {_ORIGINAL}": rope}
    given = {said: place for said, place in places.items() if place.get(_ORIGINAL) is not None}
    found = {said: _length(place, _ORIGINAL) for said, place in given.items()}
    return _agreed(found, None) or _length(hf, "max_position_embeddings")


def _length(place: dict[str, Any], name: str) -> int:
    if type(place.get(name)) is not int or place[name] < 1:
        raise ValueError(f"{name} must be a positive int, got {place.get(name)!r}")
    return place[name]


def _without_mscale(said: dict[str, Any]) -> dict[str, Any]:
    """Replace YaRN's mscale and mscale_all_dim by an attention_factor, if both are given."""
    said = dict(said)
    pair = [said.pop(name, 0) for name in ("mscale", "mscale_all_dim")]
    if any(type(value) not in (int, float) or not 0 <= value < math.inf for value in pair):
        raise ValueError(
            f"mscale and mscale_all_dim must be finite numbers, at least 0, got {pair}"
        )
    if 0 in pair or "attention_factor" in said:
        return said
    growth = Yarn(said["factor"], 1).attention_scale - 1
    mscale, of_all = (1 + value * growth for value in pair)
    return said | {"attention_factor": mscale / of_all}


def _without_default(scaling: RopeScaling) -> RopeScaling:
    """Leave out a LongRoPE's attention_factor if it follows from the factor."""
    if not isinstance(scaling, LongRope) or scaling.attention_factor is None:
        return scaling
    default = dataclasses.replace(scaling, attention_factor=None)
    same = math.isclose(default.attention_scale, scaling.attention_factor, rel_tol=1e-12)
    return default if same else scaling


def rope_to_hf(config: CPMConfig, longest: int | None) -> dict[str, Any]:
    """Return rotary positions for transformers 5 and 4, and for MiniCPM's own code.

    `longest` is max_position_embeddings. transformers 4 reads LongRoPE's original length outside of
    the scaling, and computes its factor from the two lengths. So the original length is also
    written there, and attention_factor if it does not follow from the lengths.
    """
    scaling, theta = config.rope_scaling, {"rope_theta": config.rope_theta}
    if scaling is None:
        return theta | {"rope_parameters": {"rope_type": "default", **theta}}
    said = {name: value for name, value in scaling.to_dict().items() if value is not None}
    kind = said.pop("kind")
    original = said.pop("original_length", None)
    if kind not in ("linear", "dynamic"):
        said[_ORIGINAL] = original
    outside: dict[str, Any] = {}
    if isinstance(scaling, LongRope):
        assert longest is not None, "a LongRoPE extends to a length"
        outside = {_ORIGINAL: original}
        implied = dataclasses.replace(scaling, factor=max(longest / scaling.original_length, 1.0))
        if not math.isclose(implied.attention_scale, scaling.attention_scale, rel_tol=1e-12):
            said["attention_factor"] = scaling.attention_scale
    scalings = {
        "rope_scaling": {"rope_type": kind, "type": kind, **said},
        "rope_parameters": {"rope_type": kind, **theta, **said},
    }
    return theta | outside | scalings


def longest_to_hf(scaling: RopeScaling | None, is_minicpm: bool, longest: int | None) -> int | None:
    """Return `longest`, or the length that a scaling extends to if that is more.

    transformers reads a dynamic scaling's original length from this number, and MiniCPM's code
    LongRoPE's factor. In these two cases return what makes them right.
    """
    if scaling is None or isinstance(scaling, Linear):
        return longest
    if isinstance(scaling, DynamicNTK):
        return scaling.original_length
    assert isinstance(scaling, Yarn | Llama3 | LongRope), "all others have an original length"
    extended = scaling.extended_length
    return extended if is_minicpm else max(longest or 0, extended)
