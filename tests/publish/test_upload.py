"""What is uploaded: which files next to a checkpoint, and what a publisher says when weights differ."""

import json
import os

import numpy as np
import pytest

from deltawire import Delta, Publisher, open_store
from deltawire.errors import SnapshotMismatch
from deltawire.publish.recheck import _mismatch
from deltawire.publish.upload import is_worth_sending
from support.chains import fresh_url
from support.waiting import PATIENCE

LIMIT = 64 << 20


@pytest.mark.parametrize(
    ("name", "num_bytes", "expected"),
    [
        ("config.json", 10, True), ("tokenizer.model", LIMIT, True), ("tokenizer.model", LIMIT + 1, False),
        ("model.bin", 10, False), ("other.safetensors", 10, False), ("weights.gguf", 10, False), ("a b.txt", 0, False),
    ],
)  # fmt: skip
def test_files_next_to_a_checkpoint(tmp_path, name, num_bytes, expected):
    file = tmp_path / name
    file.touch()
    os.truncate(file, num_bytes)
    assert is_worth_sending(file) == expected


def test_a_folder_is_not_sent(tmp_path):
    (tmp_path / "folder").mkdir()
    assert not is_worth_sending(tmp_path / "folder")
    assert not is_worth_sending(tmp_path / "missing")


def test_what_a_publisher_says_when_weights_differ():
    own, tied = _mismatch("a", "a"), _mismatch("head", "embed")
    assert isinstance(own, SnapshotMismatch)
    assert (own.fields, tied.fields) == ({"tensor": "a"}, {"tensor": "head"})
    assert own.message == (
        "the weights of a at the trainer are not those that would be published: they changed while publish ran, or "
        "were said to be frozen and are not, or the publisher's snapshot is damaged. Nothing was committed; make a new "
        "publisher to go on"
    )
    assert tied.message == (
        "the weights of head at the trainer are not those that would be published: it is published as embed, to which "
        "it was taken to be tied, and has other weights. Nothing was committed; make a new publisher to go on"
    )


def test_what_headers_say():
    """An anchor's metadata and a delta's header, as they lie in the store."""
    shared = np.arange(6, dtype=np.float32)
    url, weights = fresh_url(), {"embed": shared, "head": shared, "norm": np.ones(2, np.float32)}
    with Publisher(url, weights, run="r") as publisher:
        for name in ("norm", "embed"):
            publisher.publish().wait(PATIENCE)
            weights[name][0] += 1
        publisher.publish().wait(PATIENCE)
        run = publisher.run
    store = open_store(url)
    (anchor,) = [each for each in run.manifest(0).hop.objects if each.file.endswith(".safetensors")]
    data = store.get(anchor.key)
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert metadata["format"] == "pt"
    assert metadata["deltawire.total"] == "8"
    deltas = [Delta.from_bytes(store.get(run.manifest(version).hop.objects[0].key)) for version in (1, 2)]
    assert [delta.info.tied for delta in deltas] == [{}, {"head": "embed"}]
    assert [delta.info.num_elements for delta in deltas] == [8, 8]
