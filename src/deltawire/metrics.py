"""Metrics of publishers and replicas for Prometheus: read when it scrapes, in a registry of their own."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deltawire.errors import DeltawireError, MissingDependency
from deltawire.follow.replica import Replica
from deltawire.publish.machine import BasePublisher

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

HELP = {
    "publish/published": "Versions that were committed",
    "publish/failed": "Versions that could not be committed; later ones cover them",
    "publish/waiting": "Versions that are staged but not committed yet",
    "publish/version": "The last version that was committed",
    "publish/diff_seconds": "How long publish blocked the trainer to find what changed",
    "publish/check_seconds": "How long it took to copy and hash live weights again",
    "publish/encode_seconds": "How long the last version took to encode",
    "publish/upload_seconds": "How long the last version took to upload",
    "publish/commit_seconds": "How long the last version's commit took",
    "publish/coalesced": "Earlier versions merged into the last one",
    "publish/num_changed": "Weights that changed in the last version",
    "publish/num_elements": "Weights of the model",
    "publish/density": "Share of the weights that changed in the last version",
    "publish/num_bytes": "Bytes of the last version in the store",
    "publish/all_bytes": "Bytes uploaded since the version before, including skip deltas, anchors and documents",
    "publish/full_bytes": "Bytes of all weights",
    "publish/uploaded_bytes": "Bytes uploaded in total",
    "publish/uploaded_delta_bytes": "Bytes uploaded in deltas from one version to the next",
    "publish/uploaded_skip_delta_bytes": "Bytes uploaded in skip deltas and deltas from anchors",
    "publish/uploaded_anchor_bytes": "Bytes uploaded in anchors and the files next to them",
    "publish/uploaded_document_bytes": "Bytes uploaded in manifests and other documents",
    "replica/version": "The version that the weights are at",
    "replica/lag": "Versions between the weights and the newest one seen",
    "replica/pulls": "Pulls that succeeded",
    "replica/faults": "Faults while polling and pulling",
    "replica/bytes": "Bytes that the last pull fetched",
    "replica/changed": "Weights that the last pull's deltas changed",
    "replica/fetch_seconds": "How long the last pull took to fetch",
    "replica/decode_seconds": "How long the last pull took to decode and check",
    "replica/apply_seconds": "How long the last pull took to write the weights",
    "replica/served_seconds": "Time from the last version's publication until it was served, by both machines' clocks",
    "replica/pause_seconds": "How long the engine was paused for the last update",
}
COUNTERS = {"publish/published", "publish/failed", "replica/pulls", "replica/faults"}
COUNTERS |= {name for name in HELP if name.startswith("publish/uploaded_")}


def registry(*parts: BasePublisher | Replica) -> "CollectorRegistry":
    """A registry with the metrics of publishers and replicas: `deltawire/publish/num_bytes` becomes
    `deltawire_publish_num_bytes`, and counters end in `_total`.

    Each has the label `run` (empty while a replica has not found its run), those of replicas also `replica`.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise MissingDependency("metrics need another package: pip install 'deltawire[metrics]'") from None
    labels = [_labels(part) for part in parts]
    for i, each in enumerate(labels):
        if each in labels[:i]:
            raise ValueError(f"two publishers or replicas have the same labels, {each}: give replicas different names")
    found = CollectorRegistry()
    found.register(_Collector(parts))
    return found


class _Collector:
    def __init__(self, parts: tuple[BasePublisher | Replica, ...]) -> None:
        self._parts = parts

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for part in self._parts:
            labels = _labels(part)
            for full, value in part.metrics().items():
                key = full.removeprefix("deltawire/")
                if key not in families:
                    kind = CounterMetricFamily if key in COUNTERS else GaugeMetricFamily
                    name = f"deltawire_{key.replace('/', '_')}"
                    families[key] = kind(name, HELP.get(key, key), labels=list(labels))
                families[key].add_metric(list(labels.values()), value)
        yield from families.values()


def _labels(part: BasePublisher | Replica) -> dict[str, str]:
    try:
        run = part.run.id
    except DeltawireError:
        run = ""
    return {"run": run, "replica": part.name} if isinstance(part, Replica) else {"run": run}
