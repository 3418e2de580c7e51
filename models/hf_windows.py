"""Windows in config.json of Hugging Face's folders, to fields of CPMConfig and back.

`sliding_window` counts tokens as CPMConfig's window does. Families differ in the fields that say
which layers have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from .config import CPMConfig, shortest_pattern

WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_none(hf: dict[str, Any]) -> dict[str, Any]:
    """Check that no layer has a window. Raises ValueError."""
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window") is not False:
        _refuse(hf, WINDOW_FIELDS[1:])
    layers = hf.get("layer_types")
    if layers is not None and "w" in _pattern(layers, hf["num_hidden_layers"]):
        raise ValueError(
            f"layer_types give layers of this {hf['model_type']} a window, but sliding_window is "
            "off"
        )
    return {}


def read_always(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the window of all layers. Raises ValueError if fields say which layers have it."""
    return _read_named(hf, refused=WINDOW_FIELDS[1:])


def read_by_layer(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the window of the layers in layer_types, by default of all."""
    return _read_named(hf, refused=WINDOW_FIELDS[1:3])


def _read_named(hf: dict[str, Any], refused: Collection[str]) -> dict[str, Any]:
    if "sliding_window" not in hf:
        raise ValueError("config.json lacks ['sliding_window']: expected tokens, or null for none")
    if any(hf.get(name) is not None for name in refused):
        _refuse(hf, refused)
    window, count, layers = hf["sliding_window"], hf["num_hidden_layers"], hf.get("layer_types")
    if layers is None:
        layers = [_FULL if window is None else _SLIDING] * count
    return _window_fields(window, _pattern(layers, count))


def _refuse(hf: dict[str, Any], names: Collection[str]) -> None:
    said = {name: hf[name] for name in names if hf.get(name) is not None}
    values = {"sliding_window": hf.get("sliding_window"), **said}
    raise ValueError(f"cannot tell which layers of a {hf['model_type']} have a window: {values}")


def read_switched(
    hf: dict[str, Any], has_window: Callable[[dict[str, Any]], list[bool]]
) -> dict[str, Any]:
    """Return the window of the layers in layer_types, if use_sliding_window is on. Without
    layer_types these are the layers for which `has_window` returns True.
    """
    if not hf.get("use_sliding_window"):
        return read_none({**hf, "sliding_window": None})
    count, layers = hf["num_hidden_layers"], hf.get("layer_types")
    if layers is None:
        layers = [_SLIDING if has else _FULL for has in has_window(hf)]
    return _window_fields(hf.get("sliding_window"), _pattern(layers, count))


def read_qwen(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the window of a Qwen's layers: those in layer_types, or from max_window_layers on."""

    def has_window(hf: dict[str, Any]) -> list[bool]:
        first = hf.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise ValueError(
                f"max_window_layers must be the number of layers without a window, got {first!r}"
            )
        return [layer >= first for layer in range(hf["num_hidden_layers"])]

    return read_switched(hf, has_window)


def _pattern(layers: Any, count: int) -> str:
    """Return CPMConfig's letter for each entry of layer_types."""
    known = isinstance(layers, list) and all(layer in (_SLIDING, _FULL) for layer in layers)
    if not known or len(layers) != count:
        raise ValueError(
            f"layer_types must be {_SLIDING} or {_FULL} for each of {count} layers, got {layers!r}"
        )
    return "".join("w" if layer == _SLIDING else "f" for layer in layers)


def _window_fields(window: Any, pattern: str) -> dict[str, Any]:
    """Return CPMConfig's fields for a window in the layers of a pattern."""
    if "w" not in pattern:
        return {}
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a positive int, got {window!r}")
    return {"window": window, "window_pattern": shortest_pattern(pattern)}


def write_always(config: CPMConfig) -> dict[str, Any]:
    """Return the fields of a family whose layers all have the window."""
    return {"sliding_window": config.window}


def write_by_layer(config: CPMConfig) -> dict[str, Any]:
    """Return the fields of a family whose layer_types say which layers have the window."""
    layers = [_SLIDING if window else _FULL for window in config.windows]
    return {"sliding_window": config.window, "layer_types": layers}


def write_switched(config: CPMConfig) -> dict[str, Any]:
    """Return the fields of a family with use_sliding_window."""
    return {**write_by_layer(config), "use_sliding_window": config.window is not None}


def write_qwen(config: CPMConfig) -> dict[str, Any]:
    """Return a Qwen's fields."""
    layers = [window is None for window in config.windows]
    return {**write_switched(config), "max_window_layers": (*layers, False).index(False)}
