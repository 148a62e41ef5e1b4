"""Hugging Face Buckets through the real client libraries, against a double of the Hub (`hub_double.py`)."""

import hashlib
import random
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest

from deltawire.errors import Conflict, MissingDependency, ObjectMissing, StoreUnavailable
from deltawire.store import hub as hub_module
from deltawire.store.hub import HubStore
from support.hub_cas import Rejected
from support.hub_double import hub_double

BUCKET = "me/weights"
RANDOM = random.Random(7)
SOME = RANDOM.randbytes(300_000)
FLOATS = (np.arange(60_000, dtype=np.float32) / 7).tobytes()


@pytest.fixture
def hub():
    with hub_double() as double:
        double.create_bucket(BUCKET)
        yield double


@pytest.fixture
def store(hub):
    return HubStore(BUCKET, "run", token=hub.token, endpoint=hub.endpoint)


@pytest.fixture
def waits(monkeypatch):
    """Instead of sleeping, how long it would have been."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def every_call(store):
    yield lambda: store.put("a", b"1")
    yield lambda: store.create("b", b"1")
    yield lambda: store.get("a")
    yield lambda: store.get_range("a", 0, 1)
    yield lambda: store.stat("a")
    yield lambda: list(store.list())
    yield lambda: store.delete(["a"])


def test_url_and_names(hub):
    options = {"token": hub.token, "endpoint": hub.endpoint}
    assert HubStore(BUCKET, **options).url == "hf://buckets/me/weights"
    assert HubStore(BUCKET, "/run/7/", **options).url == "hf://buckets/me/weights/run/7"
    for wrong in ("", "weights", "me/weights/run"):
        with pytest.raises(ValueError, match="owner/name"):
            HubStore(wrong, **options)


@pytest.mark.parametrize("data", [b"", b"x", b"compresses " * 9000, FLOATS, SOME], ids=len)
@pytest.mark.parametrize("shape", [bytes, memoryview])
def test_bytes_come_back(store, data, shape):
    before = time.time()
    store.put("some/key", shape(data))
    assert store.get("some/key") == data
    stat = store.stat("some/key")
    assert (stat.key, stat.num_bytes) == ("some/key", len(data))
    assert before - 1 < stat.modified < time.time() + 1
    store.put("some/key", b"replaced")
    assert store.get("some/key") == b"replaced"


def test_pieces_come_back(store):
    floats = memoryview(np.frombuffer(FLOATS, np.float32))
    store.put("pieces", iter([b"", SOME, memoryview(SOME)[5:70_000], b"x", floats]))
    assert store.get("pieces") == SOME + SOME[5:70_000] + b"x" + FLOATS
    store.put("nothing", iter([]))
    assert store.get("nothing") == b""


def test_64_mib(store, hub, capfd):
    data = RANDOM.randbytes(1 << 26)
    store.put("big", (data[start : start + (5 << 20)] for start in range(0, len(data), 5 << 20)))
    assert hashlib.sha256(store.get("big")).digest() == hashlib.sha256(data).digest()
    assert store.get_range("big", 12_345_678, 20 << 20) == data[12_345_678 : 12_345_678 + (20 << 20)]
    assert store.get_range("big", len(data) - 10, 20 << 20) == data[-10:]
    assert hub.num_requests("GET /buckets/") == 0, "large reads go through the content store"
    assert capfd.readouterr() == ("", ""), "no progress bars"


def test_content_is_sent_once(store, hub):
    store.put("one", SOME)
    store.put("two", SOME)
    assert len(hub.cas.xorbs) == 1
    assert store.get("two") == SOME


@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 300_000), (70_000, 130_001), (299_999, 1), (299_990, 99), (300_000, 5), (9, 0)]
)
def test_ranges(store, start, length):
    store.put("some", SOME)
    store.put("none", b"")
    assert store.get_range("some", start, length) == SOME[start : start + length]
    assert store.get_range("none", start, length) == b""


def test_lists_every_page_in_order(store, hub):
    keys = [f"v/{number:06}" for number in range(2500)]
    hub.fill(BUCKET, [f"run/{key}" for key in RANDOM.sample(keys, len(keys))])
    hub.fill(BUCKET, ["run/vx", "run2/v/000001", "run"])
    assert [stat.key for stat in store.list()] == [*keys, "vx"]
    assert hub.num_requests("GET /api/buckets/me/weights/tree") == 3
    assert [stat.key for stat in store.list("v/00249", after="v/002495")] == keys[2496:]
    assert list(store.list("w")) == []
    assert {stat.key for stat in HubStore(BUCKET, token=hub.token, endpoint=hub.endpoint).list("run2")} == {
        "run2/v/000001"
    }


def test_deletes_many_and_the_missing(store, hub):
    hub.fill(BUCKET, [f"run/{number}" for number in range(1500)] + ["keep"])
    store.delete(str(number) for number in range(1501))
    store.delete(["never there"])
    store.delete([])
    assert list(store.list()) == []
    assert hub.num_requests("POST /api/buckets/me/weights/batch") == 3
    assert HubStore(BUCKET, token=hub.token, endpoint=hub.endpoint).stat("keep").num_bytes == 0


def test_operations_that_fail(store, hub):
    hub.fill(BUCKET, ["run/a", "run/b"])
    hub.locked = {"run/a", "run/c"}
    with pytest.raises(StoreUnavailable, match="1 objects were not removed, a is one"):
        store.delete(["a", "b", "never there"])
    assert [stat.key for stat in store.list()] == ["a"]
    for write in (store.put, store.create):
        with pytest.raises(StoreUnavailable, match="c was not written: locked"):
            write("c", b"1")


def test_many_threads(store):
    def there_and_back(number):
        store.put(str(number), SOME[number:])
        return store.get(str(number)) == SOME[number:]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(24)))


def test_missing_object(store):
    for call in (store.get, store.stat, lambda key: store.get_range(key, 0, 9), lambda key: store.get_range(key, 0, 0)):
        with pytest.raises(ObjectMissing, match="nothing is not in hf://buckets/me/weights/run") as caught:
            call("nothing")
        assert (caught.value.url, caught.value.key) == (store.url, "nothing")


def test_missing_bucket(hub):
    for call in every_call(HubStore("me/none", token=hub.token, endpoint=hub.endpoint)):
        with pytest.raises(StoreUnavailable, match=r"does not exist.* hf buckets create me/none"):
            call()


def test_wrong_token(hub):
    for call in every_call(HubStore(BUCKET, token="hf_wrong", endpoint=hub.endpoint)):
        with pytest.raises(StoreUnavailable, match=r"401.*with the token that was given"):
            call()


def test_bucket_of_another(hub):
    for call in every_call(HubStore(BUCKET, token=hub.other_token, endpoint=hub.endpoint)):
        with pytest.raises(StoreUnavailable, match="403"):
            call()


def test_token_from_the_environment(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    store = HubStore(BUCKET, endpoint=hub.endpoint)
    store.put("a", b"1")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(StoreUnavailable, match="the token from HF_TOKEN or `hf auth login`"):
        store.get("a")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StoreUnavailable, match="HF_TOKEN is not set"):
        store.get("a")


@pytest.mark.parametrize("kind", ["500", "502", "503", "504", "drop"])
def test_faults_are_waited_out(store, hub, waits, kind):
    store.put("a", b"1")
    for call in every_call(store):
        hub.fail_next(kind, 2, on="/buckets/")
        call()
    assert waits
    assert set(waits) <= {0.25, 0.5}


def test_rate_limit_is_kept(store, hub, waits):
    hub.retry_after = "7"
    hub.fail_next("429", 2, on="/paths-info")
    with pytest.raises(ObjectMissing):
        store.get("a")
    assert waits == [7.0, 7.0]


def test_rate_limit_of_the_hub():
    """The header of the Hub itself, which says when the window ends."""
    reply = SimpleNamespace(status_code=429, headers={"ratelimit": '"api";r=0;t=55', "Retry-After": "1"})
    assert hub_module._wait_seconds(reply, 0) == 55.0


def test_a_long_wait_is_refused(store, hub, waits):
    hub.retry_after = "3600"
    hub.fail_next("429")
    with pytest.raises(StoreUnavailable, match="429"):
        store.stat("a")
    assert waits == []


def test_repeats_end(store, hub, waits):
    hub.fail_next("503", 100)
    with pytest.raises(StoreUnavailable, match="503") as caught:
        store.stat("a")
    assert len(waits) == hub_module.NUM_REPEATS
    assert (caught.value.url, caught.value.key, caught.value.status) == (store.url, "a", 503)


def test_nobody_listens(waits):
    with hub_double() as gone:
        endpoint = gone.endpoint
    with pytest.raises(StoreUnavailable, match="no answer from http://127"):
        HubStore(BUCKET, token="hf_any", endpoint=endpoint).stat("a")


def test_second_creator_is_refused(store):
    store.create("a", b"first")
    with pytest.raises(Conflict) as caught:
        store.create("a", b"second")
    assert caught.value.key == "a"
    assert store.get("a") == b"first"


def test_lost_reply_is_settled(store, hub):
    hub.fail_next("lost", on="/batch")
    store.create("a", b"mine")
    assert store.get("a") == b"mine"
    assert hub.num_requests("POST /api/buckets/me/weights/batch") == 1, "settled by reading, not by writing again"


def test_lost_request_is_sent_again(store, hub, waits):
    hub.fail_next("drop", on="/batch")
    store.create("a", b"mine")
    assert store.get("a") == b"mine"


def test_creator_that_was_overtaken(store, hub, monkeypatch):
    other, batch = HubStore(BUCKET, "run", token=hub.token, endpoint=hub.endpoint), store._hub.batch

    def then_the_other(steps, key, **options):
        failed = batch(steps, key, **options)
        other.put("a", b"theirs")
        return failed

    monkeypatch.setattr(store._hub, "batch", then_the_other)
    with pytest.raises(Conflict, match="another writer"):
        store.create("a", b"mine")


def test_create_says_when_it_does_not_know(store, hub, waits):
    hub.fail_next("lost", on="/batch")
    hub.fail_next("403", on="/resolve/")
    with pytest.raises(StoreUnavailable) as caught:
        store.create("a", b"mine")
    assert caught.value.uncertain
    hub.fail_next("drop", 100, on="/batch")
    with pytest.raises(StoreUnavailable, match="not seen") as caught:
        store.create("b", b"mine")
    assert caught.value.uncertain


def test_refused_create_is_certain(store, hub):
    hub.fail_next("413", on="/batch")
    with pytest.raises(StoreUnavailable, match="413") as caught:
        store.create("a", b"mine")
    assert not hasattr(caught.value, "uncertain")


def test_an_answer_of_something_else(store, hub):
    hub.fail_next("200", on="/paths-info")
    with pytest.raises(StoreUnavailable, match="not what the Hub says"):
        store.stat("a")


def test_content_that_fails(store, hub):
    hub.fail_next("400", on="/v1/shards")
    with pytest.raises(StoreUnavailable, match="could not be transferred") as caught:
        store.put("a", SOME)
    assert caught.value.key == "a"
    assert list(store.list()) == []


def test_pieces_that_fail(store):
    def pieces():
        yield SOME
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        store.put("a", pieces())
    assert list(store.list()) == []
    store.put("a", b"and goes on")
    assert store.get("a") == b"and goes on"


def test_small_calls_print_nothing(store, capfd):
    store.create("a", SOME)
    store.get("a")
    store.delete(["a"])
    assert capfd.readouterr() == ("", "")


def test_signed_urls_are_not_shown(store, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("403 Forbidden for https://cas.example/xorb/1?X-Amz-Signature=secret")

    monkeypatch.setattr(store._hub, "_xet", lambda: SimpleNamespace(new_upload_commit=refuse))
    with pytest.raises(StoreUnavailable, match=r"403 Forbidden for https://cas\.example/xorb/1$") as caught:
        store.put("a", b"1")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("package", ["huggingface_hub", "hf_xet"])
def test_missing_package(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"pip install 'deltawire\[hub\]'"):
        HubStore(BUCKET)


def test_official_client_reads_and_writes_the_same(store, hub, tmp_path):
    from huggingface_hub import HfApi, HfFileSystem

    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    api.batch_bucket_files(BUCKET, add=[(FLOATS, "run/theirs"), (b"", "run/empty")])
    store.put("ours", SOME)
    assert store.get("theirs") == FLOATS
    assert store.get("empty") == b""
    tree = list(api.list_bucket_tree(BUCKET, "run", recursive=True))
    assert {(file.path, file.size) for file in tree} == {
        ("run/ours", len(SOME)),
        ("run/theirs", len(FLOATS)),
        ("run/empty", 0),
    }
    api.download_bucket_files(BUCKET, [("run/ours", tmp_path / "ours")], raise_on_missing_files=True)
    assert (tmp_path / "ours").read_bytes() == SOME
    files = HfFileSystem(endpoint=hub.endpoint, token=hub.token, skip_instance_cache=True)
    with files.open(f"buckets/{BUCKET}/run/ours") as file:
        file.seek(1000)
        assert file.read(10) == SOME[1000:1010]
    api.batch_bucket_files(BUCKET, delete=["run/ours"])
    with pytest.raises(ObjectMissing):
        store.stat("ours")


def test_double_checks_tokens_of_the_content_store(store, hub):
    store.put("a", SOME)
    read, write = (_content_token(hub, scope) for scope in ("read", "write"))
    xorb = next(iter(hub.cas.xorbs.items()))
    assert _send_xorb(hub, write, *xorb) == 200
    assert _send_xorb(hub, read, *xorb) == 403
    assert _send_xorb(hub, hub.token, *xorb) == 401
    hub.cas_token_seconds = -1
    assert _send_xorb(hub, _content_token(hub, "write"), *xorb) == 401


def _content_token(hub, scope):
    url = f"{hub.endpoint}/api/buckets/{BUCKET}/xet-{scope}-token"
    return httpx2.get(url, headers={"Authorization": f"Bearer {hub.token}"}).json()["accessToken"]


def _send_xorb(hub, token, name, xorb):
    url = f"{hub.endpoint}{hub.cas_path}/v1/xorbs/default/{name}"
    return httpx2.post(url, headers={"Authorization": f"Bearer {token}"}, content=xorb.raw).status_code


def test_double_checks_content(store, hub):
    store.put("a", SOME)
    name, xorb = next(iter(hub.cas.xorbs.items()))
    for broken in (xorb.raw[:-1], xorb.raw + b"\0", _flipped(xorb.raw, 100), _flipped(xorb.raw, 6), b""):
        with pytest.raises(Rejected):
            hub.cas.put_xorb(name, broken)
    shard = hub.cas.shards[0]
    # A file's hash, a segment's xorb, its size and its chunks, the range hash; and an end that comes too early.
    for broken in [_flipped(shard, 48 * entry + at) for entry, at in ((1, 0), (2, 0), (2, 36), (2, 44), (3, 0))]:
        with pytest.raises(Rejected):
            hub.cas.put_shard(broken)
    with pytest.raises(Rejected):
        hub.cas.put_shard(shard[: 48 * 5])
    hub.cas.xorbs.clear()
    with pytest.raises(Rejected, match="never uploaded"):
        hub.cas.put_shard(shard)


def _flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
