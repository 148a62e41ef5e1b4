"""deltawire ships RL weights as deltas through any bucket.

    publisher = deltawire.Publisher("s3://bucket/run", model)     # at the trainer
    publisher.publish(step=1)

    deltawire.Replica("s3://bucket/run", model).pull()            # anywhere else

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
    from deltawire.publication import Publication
    from deltawire.publisher import Publisher
    from deltawire.replica import Pull, Replica
    from deltawire.sharded import ShardedPublisher
    from deltawire.state import Digest, digest
    from deltawire.store import open_store

__version__ = "0.1.0"

_HOMES = {
    "Box": "boxes",
    "Checkpoint": "checkpoint",
    "Delta": "delta",
    "DeltawireError": "errors",
    "Digest": "state",
    "Patch": "patches",
    "Publication": "publication",
    "Publisher": "publisher",
    "Pull": "replica",
    "Replica": "replica",
    "ShardedPublisher": "sharded",
    "apply": "delta",
    "diff": "delta",
    "digest": "state",
    "open_store": "store",
    "save_anchor": "checkpoint",
}

__all__ = [
    "Box",
    "Checkpoint",
    "Delta",
    "DeltawireError",
    "Digest",
    "Patch",
    "Publication",
    "Publisher",
    "Pull",
    "Replica",
    "ShardedPublisher",
    "__version__",
    "apply",
    "diff",
    "digest",
    "open_store",
    "save_anchor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deltawire' has no attribute {name!r}")
    return getattr(import_module(f"deltawire.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
