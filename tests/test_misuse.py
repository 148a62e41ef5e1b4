"""What a new user tries first and gets wrong: each is one line that says what to do."""

import builtins
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import deltawire
from deltawire import Publisher, Replica, apply, diff, digest, open_store, save_anchor
from deltawire.cli import main
from deltawire.cli.demo import need
from deltawire.cli.pages import places
from deltawire.engines.shared_folder import one_spelling
from deltawire.errors import MissingDependency, NotEnoughMemory, ObjectMissing, UnsupportedFormat
from deltawire.publish.nudges import Nudges
from deltawire.publish.sharded.publisher import ShardedPublisher
from deltawire.tensors.dtypes import dtype_named, empty_bits
from deltawire.trainers.fleet import AgentAt, _address_of
from deltawire.trainers.trl import DeltawireTransfer
from support.chains import fresh_url, make_run

HUGE = np.broadcast_to(np.float32(0), (1 << 45,))


def takes(command, option):
    return any(each.name == option for each in command.params)


def weights():
    return {"a": np.zeros((4, 4), np.float32)}


@pytest.mark.parametrize("skips", [4, None, "4", {4}])
def test_skips_that_are_no_list(skips):
    url = fresh_url()
    with pytest.raises(TypeError, match=r"skips must be a list of lengths, such as \(4, 16, 64\)"):
        Publisher(url, weights(), skips=skips)
    assert not list(open_store(url).list())


@pytest.mark.parametrize("length", [1, 0, -4, 2.0, True])
def test_skips_of_impossible_lengths(length):
    with pytest.raises(ValueError, match="2 versions or more"):
        Publisher(fresh_url(), weights(), skips=[length])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "BF16"), ("torch.bfloat16", "BF16"), ("bfloat16", "BF16"), ("BF16", "BF16"),
        (torch.float8_e4m3fn, "F8_E4M3"), (np.float16, "F16"), (np.dtype("float16"), "F16"), (np.dtype(">f4"), "F32"),
        (torch.int8, "I8"), (np.bool_, "BOOL"), (dtype_named("F64"), "F64"),
    ],
)  # fmt: skip
def test_dtypes_of_torch_and_numpy_are_names(dtype, name):
    assert dtype_named(dtype).name == name


def test_every_dtype_parameter_takes_them():
    bits = {"w": np.arange(6, dtype=np.uint16)}
    stated = digest(bits, dtype="BF16")
    assert digest(bits, dtype=torch.bfloat16) == digest(bits, dtype={"w": torch.bfloat16}) == stated
    assert diff(bits, bits, dtype=torch.bfloat16).digest == stated
    assert apply(diff(bits, bits, dtype="BF16"), bits, dtype=torch.bfloat16) == stated
    with Publisher(fresh_url(), bits, dtype=torch.bfloat16) as publisher:
        publisher.publish().wait()
        assert publisher.run.manifest(0).digest == stated
    module = torch.nn.Linear(3, 3)
    with Publisher(fresh_url(), module, dtype=torch.float16) as publisher:
        publisher.publish().wait()
        assert publisher.run.manifest(0).digest == digest(module.half())
    assert DeltawireTransfer(fresh_url(), dtype=torch.float16)._dtype == "F16"


def test_dtypes_that_are_none():
    with pytest.raises(UnsupportedFormat, match="'complex64' is not supported, only BF16"):
        Publisher(fresh_url(), torch.nn.Linear(2, 2), dtype=torch.complex64)
    with pytest.raises(TypeError, match="a name such as 'BF16', or a dtype of torch or numpy, not int"):
        digest(weights(), dtype=7)


@pytest.mark.parametrize("how", ["module", "mapping", "pairs"])
def test_a_tensor_of_a_dtype_that_is_none_is_named(how):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("freqs", torch.ones(3, dtype=torch.complex64))
    state = module.state_dict()
    given = {"module": module, "mapping": state, "pairs": lambda: iter(state.items())}[how]
    with (
        Publisher(fresh_url(), given) as publisher,
        pytest.raises(UnsupportedFormat, match="freqs: dtype 'complex64' is not supported, only BF16") as caught,
    ):
        publisher.publish()
    assert caught.value.tensor == "freqs"


@pytest.mark.parametrize("store", [["run"], None, 3, {"url": "run"}])
def test_what_is_no_store(store):
    for use in (open_store, lambda it: Publisher(it, weights()), lambda it: Replica(it, {})):
        with pytest.raises(TypeError, match="is not a store: use a folder"):
            use(store)


def test_a_url_where_a_path_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = diff(weights(), weights())
    for use in (lambda it: Replica(fresh_url(), it), lambda it: save_anchor(weights(), it), saved.save):
        with pytest.raises(ValueError, match="s3://bucket/out is a URL"):
            use("s3://bucket/out")
    assert list(tmp_path.iterdir()) == []


def test_a_module_where_weights_by_name_are_taken(tmp_path):
    module, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    assert digest(module) == digest(module.state_dict())
    assert apply(diff(other, module), other) == digest(module)
    assert torch.equal(other.weight, module.weight)
    assert save_anchor(module, tmp_path / "anchor") == digest(module)


@pytest.mark.parametrize("given", [None, [1], np.zeros(3), "text"])
def test_what_are_no_weights_by_name(given, tmp_path):
    for use in (digest, lambda it: diff(it, it), lambda it: save_anchor(it, tmp_path / "x")):
        with pytest.raises(TypeError, match="expected weights by name"):
            use(given)
    with pytest.raises(TypeError, match="must return them by name"), Publisher(fresh_url(), lambda: given) as publisher:
        publisher.publish()


@pytest.mark.parametrize(
    "given", [torch.nn.Linear, torch.nn.Linear(2, 2).parameters(), [*torch.nn.Linear(2, 2).named_parameters()], "model"]
)
def test_what_is_no_source_of_weights(given):
    message = f"got {'the class Linear' if given is torch.nn.Linear else type(given).__name__}: pass the module itself"
    with pytest.raises(TypeError, match=message):
        Publisher(fresh_url(), given)


def test_a_module_on_the_meta_device():
    module, url = torch.nn.Linear(3, 3, device="meta"), fresh_url()
    for use in (digest, lambda it: Publisher(url, it), lambda it: Publisher(url, it.state_dict()).publish()):
        with pytest.raises(
            ValueError, match="on the meta device, where tensors have no values: load the weights first"
        ):
            use(module)
    with Publisher(url, torch.nn.Linear(3, 3)) as publisher:
        publisher.publish().wait()
    with Replica(url, module) as replica, pytest.raises(ValueError, match="on the meta device"):
        replica.pull()


def test_a_sparse_tensor():
    with pytest.raises(ValueError, match="to_dense"):
        digest({"w": torch.zeros(3, 3).to_sparse()})


def test_a_tensor_larger_than_memory():
    for use in (digest, lambda it: Publisher(fresh_url(), it).publish()):
        with pytest.raises(NotEnoughMemory, match=r"takes 140,737,488,355,328 bytes of memory") as caught:
            use({"w": HUGE})
        assert caught.value.num_bytes == HUGE.nbytes


@pytest.mark.parametrize("count", [1 << 45, 1 << 62])
def test_room_for_a_stored_tensor_larger_than_memory(count):
    with pytest.raises(NotEnoughMemory, match=f"w takes {4 * count:,} bytes"):
        empty_bits((count,), dtype_named("F32"), "w")


def test_commands_without_enough_memory(tmp_path, monkeypatch):
    def large(*_, **__):
        np.empty(1 << 46, np.float32)

    monkeypatch.setattr("deltawire.run.run.Run.__init__", large)
    result = CliRunner().invoke(main, ["ls", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: not enough memory: Unable to allocate 256. TiB")


@pytest.mark.parametrize("path", ["~", "~/runs/1", Path("~/runs/1")])
def test_a_home_that_only_a_shell_knows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, _ = make_run(1)
    saved = diff(weights(), weights())
    for use in (
        open_store, lambda it: Publisher(it, weights()).publish(), lambda it: Replica(url, it),
        lambda it: save_anchor(weights(), it), saved.save,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="begins with ~, which only a shell replaces: write the whole path"):
            use(path)
    ended = CliRunner().invoke(main, ["pull", url, "--to", str(path)])
    assert (ended.exit_code, "write the whole path" in ended.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("base", [torch.nn.Linear(2, 2), [1, 2]])
def test_a_base_that_has_no_names(base):
    with Publisher(url := fresh_url(), weights()) as publisher:
        publisher.publish()
    with pytest.raises(TypeError, match="base must be a checkpoint's path or URL, or weights by name, not"):
        Publisher(url, weights(), base=base)


def test_weights_given_to_publish():
    module = torch.nn.Linear(2, 2)
    with Publisher(fresh_url(), module) as publisher:
        with pytest.raises(TypeError, match=r"publish\(\) takes no weights, since Publisher"):
            publisher.publish(module)
        assert publisher.publish(step=1).wait().version == 0


@pytest.mark.parametrize("version", ["0", 0.0, [0]])
def test_a_version_that_is_no_integer(version):
    url, _ = make_run(1)
    with Replica(url, {}) as replica:
        for use in (replica.pull, replica.route):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                use(version)
        assert replica.pull(np.int64(0)).version == 0


@pytest.mark.parametrize("threads", [0, -1, "2", 1.5, True])
def test_threads_are_checked_before_anything_is_done(threads):
    url = fresh_url()
    for make in (Publisher, Replica, ShardedPublisher):
        with pytest.raises(ValueError, match="threads must be at least 1"):
            make(url, weights(), threads=threads)
    assert not list(open_store(url).list())


@pytest.mark.parametrize("name", [name for name, each in main.commands.items() if takes(each, "threads")])
def test_threads_of_commands_are_usage(name):
    result = CliRunner().invoke(main, [name, "--threads", "0"])
    assert (result.exit_code, "'--threads': 0 is not in the range" in result.stderr) == (2, True)


@pytest.mark.parametrize("max_file_bytes", [0, -1, "1", 1e6])
def test_sizes_of_files_are_checked_before_anything_is_done(max_file_bytes):
    with pytest.raises(ValueError, match="max_file_bytes must be a number of bytes"):
        Publisher(fresh_url(), weights(), max_file_bytes=max_file_bytes)


def test_other_arguments_of_the_wrong_kind(tmp_path):
    with pytest.raises(TypeError, match="a run's id must be a string"):
        Publisher(fresh_url(), weights(), run=5)
    with pytest.raises(TypeError, match="files must be a list"):
        Publisher(fresh_url(), weights(), files="config.json")
    with pytest.raises(ObjectMissing, match="with the weights"):
        Publisher(fresh_url(), weights(), files=[tmp_path / "config.json"])
    with pytest.raises(ValueError, match="queue_size 0 or more"):
        Publisher(fresh_url(), weights(), queue_size="1")
    with pytest.raises(ValueError, match="threads must be at least 1"):
        digest(weights(), threads="2")
    url, _ = make_run(1)
    with pytest.raises(TypeError, match="a public key must be"):
        Replica(url, {}, public_key=b"key")
    with Replica(url, {}) as replica, pytest.raises(ValueError, match="poll_seconds"):
        replica.watch(poll_seconds=-1)


@pytest.mark.parametrize("taken_by", [open_store, lambda url: Nudges([url], "t"), _address_of, one_spelling])
@pytest.mark.parametrize("url", ["http://[::1/run", "https://[x]/run", "http://host:port/run", "http://host/a\nb"])
def test_urls_that_cannot_be_parsed_are_named(taken_by, url):
    with pytest.raises(ValueError, match="is not a URL") as caught:
        taken_by(url)
    assert str(caught.value).startswith(repr(url))


@pytest.mark.parametrize("url", ["s3://[bucket/run", "abfss://container@account:x/run", "file://[x/run", "gs://b/a\tb"])
def test_stores_whose_url_cannot_be_parsed_are_named(url):
    for taken_by in (open_store, places) if url.startswith("file:") else (open_store,):
        with pytest.raises(ValueError, match="is not a URL") as caught:
            taken_by(url)
        assert str(caught.value).startswith(repr(url))


def test_a_url_that_cannot_be_parsed_keeps_its_password():
    with pytest.raises(ValueError, match="is not a URL") as caught:
        one_spelling("http://user:pass\nword@[x/")
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("engine", ["http://127.0.0.1:8000", AgentAt("http://127.0.0.1:9100")])
def test_an_engine_where_a_list_of_them_is_taken(engine):
    with pytest.raises(TypeError, match=r"engines must be a list, such as \[.http://127.0.0.1:8000.\], not "):
        DeltawireTransfer(fresh_url(), engines=engine)


# Without the extras


@pytest.fixture
def without(monkeypatch):
    """Make modules look as if they were not installed."""

    def hide(*names):
        def is_hidden(name):
            return name.partition(".")[0] in names

        for name in [name for name in sys.modules if is_hidden(name)]:
            monkeypatch.delitem(sys.modules, name)
        real, found = builtins.__import__, importlib.util.find_spec

        def importing(name, *rest, **options):
            if is_hidden(name):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *rest, **options)

        monkeypatch.setattr(builtins, "__import__", importing)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if is_hidden(name) else found(name, *rest)
        )

    return hide


EVERYTHING = ("openenv", "httpx", "pydantic", "starlette", "uvicorn", "prometheus_client", "cryptography")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["demo"], "demo"),
        (["dashboard", "{url}"], "dashboard"),
        (["attach", "--engine", "vllm", "--url", "http://127.0.0.1:1", "--from", "{url}"], "agent"),
        (["attach", "--engine", "sglang", "--url", "http://127.0.0.1:1", "--from", "{url}", "--listen", "0"], "agent"),
        (["keygen", "-o", "key"], "signing"),
        (["ls", "{url}", "--public-key", "0" * 64], "signing"),
    ],
)
def test_commands_without_their_extras(without, tmp_path, monkeypatch, arguments, extra):
    monkeypatch.chdir(tmp_path)
    url, _ = make_run(1, str(tmp_path / "run"))
    without(*EVERYTHING)
    result = CliRunner().invoke(main, [each.format(url=url) for each in arguments])
    assert result.exit_code == 1, result.output
    assert f"pip install 'deltawire[{extra}]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_package_that_a_command_meets_by_itself(without, tmp_path, monkeypatch):
    def broken(*_, **__):
        import openenv  # noqa: F401

    monkeypatch.setattr("deltawire.run.run.Run.__init__", broken)
    without("openenv")
    result = CliRunner().invoke(main, ["ls", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, "error: openenv is not installed: pip install 'deltawire[demo]'\n")


def test_what_a_command_needs_is_named():
    need("this", ["sys", "json"], "nothing")
    with pytest.raises(MissingDependency, match=r"not_there_at_all\): pip install 'deltawire\[demo\]'"):
        need("the demo", ["sys", "not_there_at_all"], "demo")


def test_the_names_that_new_users_import():
    assert set(deltawire.__all__) <= set(dir(deltawire))
