"""What is uploaded: which files next to a checkpoint, and what a publisher says when weights differ."""

import os

import pytest

from deltawire.errors import SnapshotMismatch
from deltawire.publish.recheck import _mismatch
from deltawire.publish.upload import is_worth_sending

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
