"""Metrics for Prometheus: the same numbers, well named, and nothing global."""

import sys

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deltawire import Publisher, Replica
from deltawire.engines.target import EngineTarget
from deltawire.engines.torch import TorchEngine
from deltawire.errors import MissingDependency
from deltawire.metrics import COUNTERS, HELP, registry


def scrape(found):
    """Samples by name and labels, and families by name."""
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(found).decode())}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    return samples, families


def expected(part, **labels):
    def named(key):
        name = key.replace("/", "_")
        return name + "_total" if key.removeprefix("deltawire/") in COUNTERS else name

    return {(named(key), *sorted(labels.items())): value for key, value in part.metrics().items()}


@pytest.fixture
def run(tmp_path):
    weights = {"w": np.arange(100, dtype=np.float32)}
    with Publisher(f"memory:{tmp_path}", weights, run="first") as publisher:
        publisher.publish().wait()
        weights["w"][3] = 7
        publisher.publish().wait()
        publisher.flush()
        yield publisher, f"memory:{tmp_path}"


def test_values_are_those_of_metrics(run):
    publisher, url = run
    with Replica(url, {}, name="one") as replica:
        replica.pull()
        samples, families = scrape(registry(publisher, replica))
        assert samples == expected(publisher, run="first") | expected(replica, run="first", replica="one")
    assert samples["deltawire_publish_published_total", ("run", "first")] == 2
    assert samples["deltawire_publish_num_changed", ("run", "first")] == 1
    assert samples["deltawire_replica_version", ("replica", "one"), ("run", "first")] == 1
    assert families["deltawire_publish_published"].type == "counter"
    assert families["deltawire_publish_num_bytes"].type == "gauge"


def test_every_metric_has_help_and_every_help_a_metric(run):
    publisher, url = run
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.zeros(100)))
    with Replica(url, EngineTarget(TorchEngine(module))) as replica:
        replica.pull()
        known = {key.removeprefix("deltawire/") for part in (publisher, replica) for key in part.metrics()}
        _, families = scrape(registry(publisher, replica))
    assert known == set(HELP)
    assert known >= COUNTERS
    assert {family.documentation for family in families.values()} == set(HELP.values())


def test_each_scrape_is_fresh(run):
    with Replica(run[1], {}, name="one") as replica:
        found = registry(replica)
        key = "deltawire_replica_pulls_total", ("replica", "one"), ("run", "first")
        assert scrape(found)[0][key] == 0
        replica.pull()
        assert scrape(found)[0][key] == 1


def test_two_publishers_share_a_registry(run, tmp_path):
    with Publisher(f"memory:{tmp_path}/other", {"w": np.zeros(5)}, run="second") as other:
        other.publish().wait()
        samples, _ = scrape(registry(run[0], other))
        assert samples == expected(run[0], run="first") | expected(other, run="second")


def test_parts_that_could_not_be_told_apart_are_refused(run):
    with pytest.raises(ValueError, match="same labels"):
        registry(run[0], run[0])


def test_a_replica_that_waits_for_its_run(tmp_path):
    with Replica(f"memory:{tmp_path}", {}, name="early") as replica:
        found = registry(replica)
        assert scrape(found)[0] == expected(replica, run="", replica="early")
        with Publisher(f"memory:{tmp_path}", {"w": np.zeros(5)}, run="late"):
            assert scrape(found)[0] == expected(replica, run="late", replica="early")


def test_the_global_registry_is_untouched(run):
    before = list(REGISTRY._collector_to_names)
    registry(run[0])
    assert list(REGISTRY._collector_to_names) == before
    assert b"deltawire" not in generate_latest(REGISTRY)


def test_missing_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependency, match=r"pip install 'deltawire\[metrics\]'"):
        registry(run[0])
