"""deltawire ships RL weights as deltas through any object store.

    publisher = deltawire.Publisher("s3://bucket/run", model)     # in the trainer
    publisher.publish(step=1)

    deltawire.Replica("s3://bucket/run", model).pull()            # on the inference side

Public names are imported on first use, so that `import deltawire` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.errors import DeltawireError
    from deltawire.follow.replica import Pull, Replica
    from deltawire.format.checkpoint import Checkpoint, save_anchor
    from deltawire.format.delta import Delta, apply, diff
    from deltawire.format.patches import Patch
    from deltawire.publish.publication import Publication
    from deltawire.publish.publisher import Publisher
    from deltawire.publish.sharded.publisher import ShardedPublisher
    from deltawire.store import open_store
    from deltawire.tensors.boxes import Box
    from deltawire.tensors.digest import Digest, digest

__version__ = "0.1.0"

_HOMES = {
    "Box": "tensors.boxes",
    "Checkpoint": "format.checkpoint",
    "Delta": "format.delta",
    "DeltawireError": "errors",
    "Digest": "tensors.digest",
    "Patch": "format.patches",
    "Publication": "publish.publication",
    "Publisher": "publish.publisher",
    "Pull": "follow.replica",
    "Replica": "follow.replica",
    "ShardedPublisher": "publish.sharded.publisher",
    "apply": "format.delta",
    "diff": "format.delta",
    "digest": "tensors.digest",
    "open_store": "store",
    "save_anchor": "format.checkpoint",
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
