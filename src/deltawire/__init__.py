"""deltawire ships RL weights as deltas through any bucket.

    delta = deltawire.diff(old, new)
    deltawire.apply(delta, weights)

Everything is loaded when it is first used, so that importing costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.boxes import Box
    from deltawire.checkpoint import Checkpoint, save_anchor
    from deltawire.delta import Delta, apply, diff
    from deltawire.errors import DeltawireError
    from deltawire.patches import Patch
    from deltawire.state import Digest, digest

__version__ = "0.1.0"

_HOMES = {
    "Box": "boxes",
    "Checkpoint": "checkpoint",
    "Delta": "delta",
    "DeltawireError": "errors",
    "Digest": "state",
    "Patch": "patches",
    "apply": "delta",
    "diff": "delta",
    "digest": "state",
    "save_anchor": "checkpoint",
}

__all__ = [
    "Box",
    "Checkpoint",
    "Delta",
    "DeltawireError",
    "Digest",
    "Patch",
    "__version__",
    "apply",
    "diff",
    "digest",
    "save_anchor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deltawire' has no attribute {name!r}")
    return getattr(import_module(f"deltawire.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
