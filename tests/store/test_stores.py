"""What every store promises, on every store; the real servers run on the loopback interface."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from deltawire.errors import Conflict, LimitExceeded, ObjectMissing, StoreUnavailable
from deltawire.store import open_store
from deltawire.store.base import check_key
from support.servers import BUCKET
from support.waiting import PATIENCE

MIB = 1 << 20
ODD_KEYS = ["a b", "a%20b", "%41", "ü/é", "a+b", "a~b", "a:b", "a?b", "a*b", "a=b&c", "it's", '"q"', "{a}", "[1]",
            "a@b", "!$,;()", ".hidden", "a.tmp", "x/a#b", "日本"]  # fmt: skip

# The half of the contract that web servers keep, too: they are read, and written as a folder.
reading = pytest.mark.parametrize(
    "any_store",
    ["memory", "local", *(pytest.param(kind, marks=pytest.mark.process) for kind in ("s3", "azure", "hub", "web"))],
    indirect=True,
)


def keys(store, *arguments, **options):
    return [each.key for each in store.list(*arguments, **options)]


@reading
def test_put_get_replace(any_store):
    any_store.put("folder/a", b"one")
    assert any_store.get("folder/a") == b"one"
    any_store.put("folder/a", memoryview(b"second"))
    assert any_store.get("folder/a") == b"second"
    assert type(any_store.get("folder/a")) is bytes


@reading
def test_empty_objects(any_store):
    any_store.put("bytes", b"")
    any_store.put("pieces", [])
    any_store.put("empty pieces", [b"", memoryview(b"")])
    for key in ("bytes", "pieces", "empty pieces"):
        assert any_store.get(key) == b""
        assert any_store.stat(key).num_bytes == 0
        assert any_store.get_range(key, 0, 10) == b""


@reading
def test_large_objects_in_pieces(any_store):
    blob = np.random.default_rng(1).integers(0, 256, 40 * MIB + 3, np.uint8)
    pieces = [blob[start : start + 3_000_001].data for start in range(0, len(blob), 3_000_001)]
    any_store.put("pieces", pieces)
    assert any_store.get("pieces") == blob.tobytes()
    any_store.put("generated", _Again(blob.data))
    assert any_store.get("generated") == blob.tobytes()
    any_store.put("whole", blob.tobytes())
    assert any_store.stat("whole").num_bytes == len(blob)
    assert any_store.get_range("whole", 17 * MIB - 1, 5) == blob[17 * MIB - 1 :][:5].tobytes()


class _Again:
    """Pieces from a generator, which can be asked for again."""

    def __init__(self, view):
        self.view = view

    def __iter__(self):
        yield self.view[:1]
        yield self.view[1:]


def test_pieces_of_other_types_than_bytes(any_store):
    weights = np.arange(1000, dtype=np.float32).reshape(10, 100)
    any_store.put("weights", [weights.data, weights[:0].data])
    assert any_store.get("weights") == weights.tobytes()


@reading
def test_ranges_at_the_ends(any_store):
    any_store.put("ten", b"0123456789")
    assert any_store.get_range("ten", 0, 1) == b"0"
    assert any_store.get_range("ten", 9, 1) == b"9"
    assert any_store.get_range("ten", 8, 100) == b"89"
    assert any_store.get_range("ten", 0, 100) == b"0123456789"
    assert any_store.get_range("ten", 10, 1) == b""
    assert any_store.get_range("ten", 1000, 1) == b""
    assert any_store.get_range("ten", 3, 0) == b""


def test_listing_is_ordered_and_starts_after(any_store):
    names = ["a", "a-b", "a.b", "a/b", "a/c/d", "a0", "b/1", "b/10", "b/2", "ü"]
    if any_store.url.startswith("file:"):
        names.remove("a")  # a file cannot be a folder too
    for name in reversed(names):
        any_store.put(name, name.encode())
    assert keys(any_store) == sorted(names)
    assert keys(any_store, "a/") == ["a/b", "a/c/d"]
    assert keys(any_store, "a/b") == ["a/b"]
    assert keys(any_store, "b/1") == ["b/1", "b/10"]
    assert keys(any_store, "b/", after="b/1") == ["b/10", "b/2"]
    assert keys(any_store, "b/", after="b/15") == ["b/2"]
    assert keys(any_store, after="b/2") == ["ü"]
    assert keys(any_store, "nothing") == []
    assert [each.num_bytes for each in any_store.list("b/")] == [3, 4, 3]


def test_listing_of_many(any_store):
    count = 1234 if any_store.url.startswith(("memory", "file", "s3")) else 60
    names = [f"many/{number:08d}" for number in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: any_store.put(name, b"x"), names))
    assert keys(any_store, "many/") == names
    assert keys(any_store, "many/", after=names[-3]) == names[-2:]
    any_store.delete(names)
    assert keys(any_store) == []


@reading
def test_stat(any_store):
    before = time.time()
    any_store.put("a", b"four")
    stat = any_store.stat("a")
    assert (stat.key, stat.num_bytes) == ("a", 4)
    assert before - 2 < stat.modified < time.time() + 2
    assert next(any_store.list()).num_bytes == 4


def test_delete(any_store):
    for name in ("a", "b", "c"):
        any_store.put(name, b"x")
    any_store.delete(name for name in ("missing", "a", "folder/missing", "b"))
    assert keys(any_store) == ["c"]
    any_store.delete(["c", "c"])
    any_store.delete([])
    assert keys(any_store) == []


def test_create_once(any_store):
    any_store.create("a", b"first")
    with pytest.raises(Conflict) as caught:
        any_store.create("a", b"second")
    assert caught.value.key == "a"
    assert caught.value.url == any_store.url
    assert any_store.get("a") == b"first"
    any_store.delete(["a"])
    any_store.create("a", b"third")
    assert any_store.get("a") == b"third"


def test_a_create_race_has_one_winner(any_store):
    if not any_store.conditional:
        pytest.skip("this store does not decide creates")
    writers, rounds = 12, 3
    barrier = Barrier(writers)

    def write(writer):
        won = []
        for number in range(rounds):
            barrier.wait(PATIENCE)
            try:
                any_store.create(f"race/{number}", f"writer {writer}".encode())
                won.append((number, writer))
            except Conflict:
                pass
        return won

    with ThreadPoolExecutor(writers) as pool:
        won = [each for result in pool.map(write, range(writers)) for each in result]
    assert sorted(number for number, _ in won) == list(range(rounds))
    for number, writer in won:
        assert any_store.get(f"race/{number}") == f"writer {writer}".encode()


@reading
def test_odd_keys_stay_as_they_are(any_store):
    for key in ODD_KEYS:
        any_store.put(key, key.encode())
    assert keys(any_store) == sorted(ODD_KEYS)
    for key in ODD_KEYS:
        assert any_store.get(key) == key.encode()
        assert any_store.stat(key).key == key
    any_store.delete(ODD_KEYS)
    assert keys(any_store) == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\nb", "a\\b", "a#1"])
def test_keys_that_some_store_would_change(key, tmp_path):
    with pytest.raises(ValueError, match="cannot be the key"):
        check_key(key)
    with pytest.raises(ValueError, match="cannot be the key"):
        open_store(tmp_path).put(key, b"")


@reading
def test_missing_objects(any_store):
    for read in (any_store.get, any_store.stat, lambda key: any_store.get_range(key, 0, 1)):
        with pytest.raises(ObjectMissing) as caught:
            read("no/such")
        assert caught.value.key == "no/such"
        assert caught.value.url == any_store.url
    assert keys(any_store) == []


def test_failures_of_the_pieces_are_the_callers(any_store):
    def broken():
        yield b"x" * 20 * MIB
        raise FileNotFoundError("a file of the caller's")

    with pytest.raises(FileNotFoundError, match="caller's"):
        any_store.put("a", broken())
    assert keys(any_store) == []


def test_prefixes_do_not_see_each_other(s3_server, tmp_path):
    for url in (f"s3://{BUCKET}/apart", "memory:apart/in", f"file://{tmp_path}/apart"):
        one, other, deeper = (open_store(url + end, config=s3_server.config) for end in ("", "-2", "/deeper"))
        one.put("a", b"one")
        other.put("a", b"other")
        assert one.get("a") == b"one"
        assert keys(one) == keys(other) == ["a"]
        deeper.put("b", b"")
        assert keys(one) == ["a", "deeper/b"]


def test_memory_is_shared_by_name():
    open_store("memory:shared").put("a", b"x")
    assert open_store("memory:shared").get("a") == b"x"
    assert open_store("memory://shared").get("a") == b"x"
    assert keys(open_store("memory:other")) == []
    assert open_store("memory:").url == "memory:"


def test_a_folder_appears_with_the_first_write(tmp_path):
    folder = tmp_path / "not yet" / "run#1"
    store = open_store(folder)
    assert keys(store) == []
    with pytest.raises(ObjectMissing):
        store.get("a")
    store.delete(["a"])
    assert not folder.exists()
    store.put("b/c", b"x")
    assert (folder / "b" / "c").read_bytes() == b"x"
    assert keys(open_store(f"file://{tmp_path}/not%20yet/run%231")) == ["b/c"]


@pytest.mark.parametrize("name", ["run#1", "x#y", "a%20b", "100%", "what?", "ü ö"])
def test_a_folder_is_found_by_its_url(tmp_path, name):
    store = open_store(tmp_path / name)
    store.put("a", b"x")
    assert open_store(store.url).get("a") == b"x"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_store_is_opened_as_it_is(any_store):
    assert open_store(any_store) is any_store


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "http:///x",
        "https://h/x#y",
        "",
        "hf://models/a/b",
        "s3:///x",
        "file://h/x",
        "s3://b/run#1",
        "az://b/run#",
        "file:///tmp/run#1",
        "file:///tmp/run?1",
        "s3://b/runs//1",
        "az://b/runs/../1",
        "s3://b/./1",
        "memory:m/runs//1",
        "memory:m/a\x01b",
        "/tmp/a\nb",
        "/tmp/a\udcff",
        "hf://buckets/a/b/runs//1",
        "hf://buckets/a/b/a\x7f",
    ],
)
def test_urls_that_are_no_store(url):
    credentials = {"s3": {"access_key_id": "a", "secret_access_key": "b"},
                   "az": {"account_name": "a", "account_key": "Yg=="}}  # fmt: skip
    with pytest.raises(ValueError, match=r"use a folder|write "):
        open_store(url, config=credentials.get(url[:2]))


def test_no_credentials_is_said_quickly(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_EC2_METADATA_DISABLED", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for url, name in (("s3://b/p", "AWS_ACCESS_KEY_ID"), ("gs://b/p", "GOOGLE_APPLICATION"), ("az://b/p", "AZURE_")):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=name) as caught:
            open_store(url).get("a")
        assert time.monotonic() - started < 30
        assert caught.value.refused


def test_the_environment_configures_s3(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    store = open_store(f"s3://{BUCKET}/environment")
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_the_environment_configures_azure(azure_server, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure_server.config["account_name"])
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure_server.config["account_key"])
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure_server.endpoint)
    store = open_store(f"azure://{BUCKET}/environment")
    store.put("a", b"x")
    assert store.get("a") == b"x"


@pytest.mark.parametrize("endpoint", ["minio:9000", "127.0.0.1:9000", "http://", "http://h:port", "http://h:99999",
                                      "http://[h", "http:// h", "ftp://h", "http://ü.example"])  # fmt: skip
def test_endpoints_that_are_no_url(endpoint, monkeypatch):
    """The client would panic at the first request."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match="is not a URL") as caught:
        open_store(f"s3://{BUCKET}/x")
    assert repr(endpoint) in str(caught.value)


def test_a_client_that_panics(s3_server):
    """As with a key that a secret has kept with the newline at its end."""
    store = open_store(f"s3://{BUCKET}/x", config=s3_server.config | {"access_key_id": "key\n"})
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.create("a", b""), store.list):
        with pytest.raises(StoreUnavailable, match=r"InvalidHeaderValue; look at AWS_ACCESS_KEY_ID") as caught:
            call()
        assert caught.value.refused


def test_profiles_of_boto3(s3_server, monkeypatch, tmp_path):
    secrets = f"aws_access_key_id={s3_server.access_key}\naws_secret_access_key={s3_server.secret}\n"
    (tmp_path / "credentials").write_text(f"[mine]\n{secrets}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    store = open_store(f"s3://{BUCKET}/profile")
    store.put("a", b"x")
    assert store.get("a") == b"x"
    monkeypatch.setenv("AWS_PROFILE", "none such")
    with pytest.raises(StoreUnavailable, match="none such"):
        open_store(f"s3://{BUCKET}/profile")


@pytest.mark.parametrize("change", [{"secret_access_key": "wrong"}, {"access_key_id": "unknown"}])
def test_wrong_credentials(s3_server, change):
    store = open_store(f"s3://{BUCKET}/x", config=s3_server.config | change)
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.create("a", b""), store.list):
        with pytest.raises(StoreUnavailable, match=r"refused.*AWS_SECRET_ACCESS_KEY") as caught:
            call()
        assert caught.value.refused
        assert not caught.value.uncertain
        assert "\n" not in caught.value.message
        assert "wrong" not in caught.value.message


def test_a_bucket_that_does_not_exist(s3_server, azure_server):
    for url, server in (("s3://no-such-bucket", s3_server), ("az://no-such-bucket", azure_server)):
        store = open_store(url, config=server.config)
        for call in (lambda store=store: store.get("a"), lambda store=store: list(store.list())):
            with pytest.raises(StoreUnavailable, match="bucket does not exist") as caught:
                call()
            assert caught.value.url == url


def test_settings_that_the_client_does_not_know(s3_server):
    with pytest.raises(StoreUnavailable, match="nonsense"):
        open_store("s3://bucket", config=s3_server.config | {"nonsense": "1"})


@pytest.mark.process
@pytest.mark.parametrize(("used", "said"), [(True, "start it with spawn"), (False, "has no a")])
def test_a_forked_process(used, said):
    program = (
        "import os, signal\nfrom deltawire.store import open_store\nstore = open_store('memory:')\n"
        + "store.put('b', b'')\n" * used
        + "if os.fork():\n    os.wait()\nelse:\n    signal.alarm(20)\n"
        "    try:\n        store.get('a')\n    except Exception as error:\n        print(error, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said in done.stdout


@pytest.mark.process
def test_the_package_loads_no_client():
    program = (
        "import sys, deltawire, deltawire.store\n"
        "print([name for name in ('obstore', 'huggingface_hub', 'boto3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@reading
def test_get_is_bounded(any_store):
    any_store.put("a", b"12345")
    assert any_store.get("a", limit=5) == b"12345"
    with pytest.raises(LimitExceeded, match="5 bytes"):
        any_store.get("a", limit=4)
    with pytest.raises(Conflict):
        any_store.create("a", b"1")
