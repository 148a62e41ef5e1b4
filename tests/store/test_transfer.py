"""Downloads: in parts, resumed, checked; and the size and digest of what is uploaded."""

import hashlib
import os
import subprocess
import threading

import numpy as np
import pytest

from deltawire.errors import CorruptObject, ObjectMissing, StoreUnavailable
from deltawire.store import open_store, transfer
from deltawire.store.transfer import Measured, download
from support.waiting import eventually

PART = 1000
BLOB = np.random.default_rng(2).integers(0, 256, 10 * PART + 7, np.uint8).tobytes()
FACTS = {"num_bytes": len(BLOB), "sha256": hashlib.sha256(BLOB).hexdigest()}


class Watched:
    """A real store that notes the ranges asked for, and does to them what a test wants."""

    def __init__(self, store, change=lambda start, data: data):
        self.store, self.change, self.asked, self.lock = store, change, [], threading.Lock()
        self.url = store.url

    def get_range(self, key, start, length):
        with self.lock:
            self.asked.append((start, length))
        return self.change(start, self.store.get_range(key, start, length))

    def stat(self, key):
        return self.store.stat(key)


@pytest.fixture
def memory(request):
    store = open_store(f"memory:transfer/{request.node.name}")
    store.put("blob", BLOB)
    return store


def fetch(store, path, *, parallel=3, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PART_BYTES", PART)
        patch.setattr(transfer, "MAX_PARTS_IN_FLIGHT", parallel)
        download(store, "blob", path, **{**FACTS, **options})


def left_behind(folder):
    return sorted(each.name for each in folder.iterdir())


def test_download_from_any_store(any_store, tmp_path):
    any_store.put("blob", BLOB)
    target = tmp_path / "new folder" / "file"
    fetch(any_store, target)
    assert target.read_bytes() == BLOB
    assert left_behind(target.parent) == ["file"]


def test_progress_counts_what_is_there(memory, tmp_path):
    seen = []
    fetch(memory, tmp_path / "file", progress=seen.append)
    assert seen == [*range(PART, len(BLOB), PART), len(BLOB)]


def test_an_interrupted_download_goes_on(memory, tmp_path):
    class Interrupted(Exception):
        pass

    def stop_in_the_middle(num_bytes):
        if num_bytes == 4 * PART:
            raise Interrupted

    with pytest.raises(Interrupted):
        fetch(memory, tmp_path / "file", progress=stop_in_the_middle)
    assert (tmp_path / "file.part").read_bytes() == BLOB[: 4 * PART]
    watched, seen = Watched(memory), []
    fetch(watched, tmp_path / "file", progress=seen.append)
    assert sum(length for _, length in watched.asked) == len(BLOB) - 4 * PART
    assert min(watched.asked)[0] == 4 * PART == seen[0]
    assert (tmp_path / "file").read_bytes() == BLOB
    assert left_behind(tmp_path) == ["file"]


def test_a_failed_part_leaves_what_came_before(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire.store.retry.time.sleep", lambda seconds: None)

    def fail(start, data):
        if start == 5 * PART:
            raise StoreUnavailable("down")
        return data

    watched = Watched(memory, fail)
    with pytest.raises(StoreUnavailable):
        fetch(watched, tmp_path / "file")
    assert (tmp_path / "file.part").read_bytes() == BLOB[: 5 * PART]
    assert [start for start, _ in watched.asked].count(5 * PART) == 4


def test_a_part_is_asked_for_again(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("deltawire.store.retry.time.sleep", lambda seconds: None)
    failures = [StoreUnavailable("once"), StoreUnavailable("twice")]

    def fail_twice(start, data):
        if start == 5 * PART and failures:
            raise failures.pop()
        return data

    fetch(Watched(memory, fail_twice), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BLOB


def test_a_refusal_is_not_asked_again(memory, tmp_path):
    def refuse(start, data):
        raise StoreUnavailable("no", refused=True)

    watched = Watched(memory, refuse)
    with pytest.raises(StoreUnavailable, match="no"):
        fetch(watched, tmp_path / "file", parallel=1)
    assert len(watched.asked) == 1


def test_no_more_parts_in_flight_than_said(memory, tmp_path):
    ahead = []

    def note(num_bytes):
        ahead.append(max(start for start, _ in watched.asked) - num_bytes)

    watched = Watched(memory)
    fetch(watched, tmp_path / "file", progress=note, parallel=2)
    assert max(ahead) <= 2 * PART


def test_a_damaged_beginning_on_disk_is_noticed(memory, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * PART)
    watched = Watched(memory)
    fetch(watched, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BLOB
    assert sum(length for _, length in watched.asked) == 2 * len(BLOB) - PART


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_a_partial_file_that_is_complete_or_too_long(memory, tmp_path, extra):
    (tmp_path / "file.part").write_bytes(BLOB + extra)
    watched = Watched(memory)
    fetch(watched, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BLOB
    assert bool(watched.asked) == bool(extra)


def test_damaged_once_then_right(memory, tmp_path):
    damage = [b"x" * PART]
    fetch(Watched(memory, lambda start, data: damage.pop() if damage else data), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BLOB


def test_damaged_for_ever(memory, tmp_path):
    (tmp_path / "file").write_bytes(b"an older one")
    memory.put("blob", BLOB[:-1] + bytes([BLOB[-1] ^ 1]))
    watched = Watched(memory)
    with pytest.raises(CorruptObject) as caught:
        fetch(watched, tmp_path / "file")
    assert (caught.value.key, caught.value.expected) == ("blob", FACTS["sha256"])
    assert caught.value.actual == hashlib.sha256(memory.get("blob")).hexdigest()
    assert sum(length for _, length in watched.asked) == 2 * len(BLOB)
    assert left_behind(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"an older one"


@pytest.mark.parametrize("num_bytes", [0, 1, PART, len(BLOB) - 1])
def test_a_short_object(memory, tmp_path, num_bytes):
    memory.put("blob", BLOB[:num_bytes])
    with pytest.raises(CorruptObject) as caught:
        fetch(memory, tmp_path / "file", parallel=1)
    assert (caught.value.key, caught.value.expected, caught.value.actual) == ("blob", len(BLOB), num_bytes)
    assert left_behind(tmp_path) == []


def test_a_missing_object(memory, tmp_path):
    for info in ({}, {"num_bytes": 0, "sha256": hashlib.sha256().hexdigest()}):
        with pytest.raises(ObjectMissing):
            download(memory, "none", tmp_path / "file", **{**FACTS, **info})
        assert left_behind(tmp_path) == []


def test_an_empty_object(memory, tmp_path):
    memory.put("blob", b"")
    fetch(memory, tmp_path / "file", num_bytes=0, sha256=hashlib.sha256().hexdigest())
    assert (tmp_path / "file").read_bytes() == b""


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(memory, tiny_disk):
    large = bytes(200_000)
    memory.put("blob", large)
    with pytest.raises(StoreUnavailable, match="disk is full") as caught:
        fetch(memory, tiny_disk / "file", num_bytes=len(large))
    assert caught.value.refused
    assert left_behind(tiny_disk) == []


def has_room(folder):
    """A file that is removed while it is open takes its space until it is closed."""
    found = os.statvfs(folder)
    return found.f_bfree == found.f_blocks


def test_a_full_disk_under_a_folder(tiny_disk):
    store = open_store(tiny_disk)
    for write in (store.put, store.create):
        with pytest.raises(StoreUnavailable, match="disk is full"):
            write("blob", bytes(200_000))
    with pytest.raises(StoreUnavailable, match="disk is full"):
        store.put("blob", [bytes(9 << 20)] * 3)
    assert list(store.list()) == []
    # The client takes away what it had begun to write in a thread of its own.
    eventually(lambda: not any(tiny_disk.iterdir()) and has_room(tiny_disk), "the disk to be empty")
    store.put("small", b"still works")
    assert store.get("small") == b"still works"


def test_a_file_that_may_not_be_written(memory, tmp_path):
    (tmp_path / "file.part").mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be written") as caught:
        fetch(memory, tmp_path / "file")
    assert caught.value.path == str(tmp_path / "file.part")


def test_measured_pieces():
    pieces = [b"one", memoryview(b"two"), np.arange(3, dtype=np.uint32).data]
    whole = b"".join(bytes(piece) for piece in pieces)
    info = len(whole), hashlib.sha256(whole).hexdigest()
    measured = Measured(pieces)
    for _ in range(2):  # an upload may be repeated
        assert b"".join(bytes(piece) for piece in measured) == whole
        assert (measured.num_bytes, measured.sha256) == info
    assert list(Measured([])) == []


def test_what_is_there_already_is_checked_and_not_fetched_again(memory, tmp_path):
    store = Watched(memory)
    fetch(store, tmp_path / "file")
    store.asked.clear()
    fetch(store, tmp_path / "file")
    assert store.asked == []
    (tmp_path / "file").write_bytes(BLOB[:-1] + bytes([BLOB[-1] ^ 1]))  # someone has changed it
    fetch(store, tmp_path / "file")
    assert len(store.asked) == 11
    assert (tmp_path / "file").read_bytes() == BLOB
