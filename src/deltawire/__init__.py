"""deltawire ships RL weights as deltas through any object store.

    publisher = deltawire.Publisher("s3://bucket/run", model)     # in the trainer
    publisher.publish(step=1)

    deltawire.Replica("s3://bucket/run", model).pull()            # on the inference side

Public names are imported on first use, so that `import deltawire` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.errors import DeltawireError as DeltawireError
    from deltawire.follow.pull import Pull as Pull
    from deltawire.follow.replica import Replica as Replica
    from deltawire.format.checkpoint import Checkpoint as Checkpoint
    from deltawire.format.checkpoint import save_anchor as save_anchor
    from deltawire.format.delta import Delta as Delta
    from deltawire.format.delta import diff as diff
    from deltawire.format.patches import Patch as Patch
    from deltawire.format.replay import apply as apply
    from deltawire.publish.publication import Publication as Publication
    from deltawire.publish.publisher import Publisher as Publisher
    from deltawire.publish.sharded.publisher import ShardedPublisher as ShardedPublisher
    from deltawire.store import open_store as open_store
    from deltawire.tensors.boxes import Box as Box
    from deltawire.tensors.digest import Digest as Digest
    from deltawire.tensors.digest import digest as digest

__version__ = "0.2.0"

_HOMES = {
    "Box": "tensors.boxes",
    "Checkpoint": "format.checkpoint",
    "Delta": "format.delta",
    "DeltawireError": "errors",
    "Digest": "tensors.digest",
    "Patch": "format.patches",
    "Publication": "publish.publication",
    "Publisher": "publish.publisher",
    "Pull": "follow.pull",
    "Replica": "follow.replica",
    "ShardedPublisher": "publish.sharded.publisher",
    "apply": "format.replay",
    "diff": "format.delta",
    "digest": "tensors.digest",
    "open_store": "store",
    "save_anchor": "format.checkpoint",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deltawire' has no attribute {name!r}")
    return getattr(import_module(f"deltawire.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
