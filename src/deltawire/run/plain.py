"""Values as plain JSON: step and metadata of a version, checked alike by writers and readers, and fields of objects."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from deltawire.tensors.names import is_text

MOST_METADATA_BYTES = 1_000_000
MOST_DEPTH = 32

# Attributes that have a longer name than the field of a document.
_ATTRIBUTES = {"bytes": "num_bytes", "changed": "num_changed", "total": "num_elements", "kept": "num_kept"}


def json_fields(thing: Any, *names: str) -> dict[str, Any]:
    """Attributes of an object as fields of a document; `bytes` is `num_bytes`, and so on. A digest becomes text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping | tuple):
            return dict(value) if isinstance(value, Mapping) else list(value)
        return value if value is None or isinstance(value, str | int | float) else str(value)

    return {name: plain(getattr(thing, _ATTRIBUTES.get(name, name))) for name in names}


def plain_step(value: Any) -> int | None:
    """A step as an int, from an integer of Python, numpy or torch."""
    if value is None:
        return None
    number = _one(value, "step")
    if type(number) is not int:
        raise TypeError(f"step must be a whole number or None, not {value!r} ({type(value).__name__})")
    return _whole(number, "step")


def plain_metadata(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the metadata with numpy and torch scalars as Python numbers, and tuples as lists."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"metadata must be a mapping, not {type(value).__name__}")
    copied: dict[str, Any] = _plain(value, "metadata", 0)
    if (size := len(json.dumps(copied, separators=(",", ":")))) > MOST_METADATA_BYTES:
        raise ValueError(
            f"metadata has {size} bytes as JSON, more than the limit of {MOST_METADATA_BYTES}: store it elsewhere"
        )
    return copied


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise ValueError(f"{where[:80]} is nested more than {MOST_DEPTH} levels deep, or contains itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, but keys in JSON are strings: write {str(key)!r}")
        return {_text(key, where): _plain(value[key], f"{where}[{key!r}]", depth + 1) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(each, f"{where}[{number}]", depth + 1) for number, each in enumerate(value)]
    value = _one(value, where)
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(value, where)
    if type(value) is int:
        return _whole(value, where)
    if not isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot represent: leave it out, or write None")
    return value


def _one(value: Any, where: str) -> Any:
    """A scalar as a plain Python value: None, a bool, a number or text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "item") and hasattr(value, "shape"):
        if any(size != 1 for size in value.shape):
            raise TypeError(
                f"{where} is an array of shape {list(value.shape)}: pass a single number, or a list with .tolist()"
            )
        # JSON has no dates and complex numbers, although their items could be converted.
        if getattr(value.dtype, "kind", "") not in ("m", "M", "c"):
            value = _item(value, where)
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{where} is {value!r:.80} ({type(value).__name__}), which JSON cannot represent")


def _item(value: Any, where: str) -> Any:
    try:
        found = value.item()
        # item() of long doubles, and of the small floats of ml_dtypes, returns the scalar itself.
        return float(found) if hasattr(found, "item") else found
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"{where} is {type(value).__name__} without a value: {error}") from None


def _whole(number: int, where: str) -> int:
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{where} is a number of more than 64 bits: write it as text")
    return number


def _text(text: str, where: str) -> str:
    if not is_text(text):
        raise ValueError(f"{where} holds {text!r:.80}, which is not valid UTF-8: it has a lone surrogate")
    return str.__str__(text)
