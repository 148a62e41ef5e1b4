"""SGLang as an engine, against a loopback server that enforces its contract: `sglang_double`."""

import io
import re
import shlex
from base64 import b64encode

import httpx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from deltawire.cli import main
from deltawire.engines.sglang import loader
from deltawire.engines.sglang.adapter import SglangEngine
from deltawire.engines.sglang.ranks import LOADER, pickled
from deltawire.errors import Conflict, EngineRejected, UnknownParameter
from support import ROOT
from support.sglang_double import PROMPT, Double, Scaling, Trainer, Unpickler
from support.waiting import eventually


@pytest.mark.parametrize("mirror", [True, False], ids=["folder", "memory"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_patches_are_written_in_place(start, ranks, mirror):
    run = start(ranks=ranks)
    replica = run.attach(mirror=mirror)
    replica.pull()
    assert run.is_current(0)
    for version in range(1, 11):
        if version == 5:
            run.trainer.step(density=0.9)
        run.step(anchor=version == 5)
        with run.traffic(1) as answers:
            replica.pull()
        assert run.is_current(version)
        assert all(len(answer["outputs"]) == 40 for answer in answers)
        assert run.generate()["outputs"] == run.server.fresh_outputs(run.trainer, PROMPT, 3)
        assert 0 < replica.status()["pause_seconds"] < 10
    # The anchor of version 5 changes most weights, so it is loaded.
    assert run.server.calls.count("/update_weights_from_disk") == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_mirror_is_loaded(start, ranks):
    run = start(ranks=ranks, loaders=())
    replica = run.attach(mode="disk")
    for version in range(11):
        if version:
            run.step(anchor=version == 5)
        with run.traffic(1) as answers:
            replica.pull()
        assert run.is_current(version)
        assert all(len(answer["outputs"]) == 40 for answer in answers)
        assert run.generate()["outputs"] == run.server.fresh_outputs(run.trainer, PROMPT, 3)
    assert run.server.calls.count("/update_weights_from_disk") == 11


def test_an_anchor_goes_through_the_servers_own_loading(start):
    run = start(ranks=2)
    replica = run.attach(mirror=False)
    replica.pull()
    assert run.server.calls.count("/update_weights_from_disk") == 1
    assert not list(run.stage.glob("*/checkpoint*"))
    assert run.is_current(0)


def test_looking_asks_no_rank(start):
    run = start(ranks=2)
    replica = run.attach()
    replica.pull()
    run.server.calls.clear()
    for _ in range(5):
        replica.target.refresh()
    assert run.server.calls == ["/model_info"] * 5


def test_no_token_is_computed_from_a_mix(start):
    run = start(ranks=2)
    run.attach().pull()
    versions = [run.server.fresh_outputs(run.trainer, PROMPT, 40)]
    with run.traffic() as answers:
        for _ in range(4):
            run.step()
            run.replica.pull()
            versions.append(run.server.fresh_outputs(run.trainer, PROMPT, 40))
        eventually(lambda: len(answers) >= 4, "answers")
    for answer in answers:
        # A request goes on from the tokens that it has, so only the first output is known for each version.
        assert answer["outputs"][0] in [version[0] for version in versions]
        assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_kv_keep_goes_on_from_what_was_computed(start):
    run = start()
    run.attach(running_requests="keep").pull()
    before = run.generate()["outputs"]
    run.step()
    run.replica.pull()
    assert run.is_current(1)
    stale, fresh = run.generate()["outputs"], run.server.fresh_outputs(run.trainer, PROMPT, 3)
    assert stale[0] not in (before[0], fresh[0])
    assert "/flush_cache" not in run.server.calls


def test_kv_abort_ends_requests(start):
    run = start()
    run.attach(running_requests="abort").pull()
    run.step()
    with run.traffic() as answers:
        run.replica.pull()
    assert run.is_current(1)
    assert "abort" in {answer["meta_info"]["finish_reason"]["type"] for answer in answers}


def test_a_server_without_the_loader(start):
    run = start(loaders=())
    with pytest.raises(EngineRejected, match=f"not started with --custom-weight-loader {re.escape(LOADER)}"):
        run.attach().pull()


def test_a_tensor_that_is_not_copied_is_refused_by_name(start):
    run = start(model=Scaling, ranks=2)
    with pytest.raises(EngineRejected, match=r"down.* not copied"):
        run.attach().pull()
    assert (run.server.version, run.server.paused) == ("default", None)


def test_a_tensor_that_the_server_does_not_have(start):
    run = start()
    run.trainer.extra = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    run.publish(anchor=True)
    with pytest.raises(UnknownParameter, match="0 of the 4 elements of extra"):
        run.attach().pull()
    assert run.server.paused is None


def test_the_way_disk_needs_a_folder(start):
    run = start()
    with pytest.raises(EngineRejected, match="needs a mirror in a folder"):
        run.attach(mode="disk", mirror=False).pull()
    assert run.server.paused is None


def test_an_api_key(start):
    run = start(api_key="secret")
    with pytest.raises(EngineRejected, match="401"):
        run.attach().pull()
    run.attach(api_key="secret").pull()
    assert run.is_current(0)


def test_one_agent_at_a_time(start):
    run = start()
    run.attach()
    with pytest.raises(Conflict, match="another agent"):
        SglangEngine(run.server.url, shared_folder=run.stage)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="mode is one of patch, disk"):
        SglangEngine("http://127.0.0.1:1", mode="post")
    with pytest.raises(ValueError, match="running_requests is one of"):
        SglangEngine("http://127.0.0.1:1", running_requests="all")


def test_the_tensor_passes_the_servers_unpickler():
    data = bytes(range(256)) * 3
    ((name, tensor),) = Unpickler(io.BytesIO(pickled("deltawire", data))).load()
    assert (name, bytes(tensor.tolist())) == ("deltawire", data)


@pytest.mark.parametrize("tensors", [[], [("x", torch.tensor([1, 2, 3]))], [("x", torch.tensor([123, 125]))]])
def test_the_loader_never_raises(tensors, caplog):
    loader.load(torch.nn.Linear(1, 1), tensors)
    assert "could not be read" in caplog.text


def page_commands():
    text = (ROOT / "docs" / "guides" / "sglang.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("deltawire ")
    ]


def test_the_commands_of_the_page(start, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    run = start(url=str(tmp_path / "run"))
    run.step()
    done = []
    for command in page_commands():
        words = shlex.split(command.replace("s3://bucket/my-run", run.url))[1:]
        words = [word.replace("http://127.0.0.1:30000", run.server.url) for word in words]
        words += ["--until", "1"] if words[0] == "attach" else []
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, (command, result.output)
        if words[0] == "attach":
            assert run.server.version == "1"
            assert run.server.serves(run.trainer)
        done.append((words[0], run.server.calls.count("/update_weights_from_disk")))
        # As `python -m sglang.launch_server --model-path base` does.
        run.server.checkpoint = home / "base"
        run.server.restart()
    assert done == [("pull", 0), ("attach", 0), ("attach", 1)]


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        ([("/update_weights_from_tensor", {})], None),
        ([("/end_weight_update", {})], None),
        ([("/begin_weight_update", {}), ("/begin_weight_update", {})], None),
        ([("/begin_weight_update", {}), ("/update_weights_from_tensor", {"load_format": "os.system"})], "os.system"),
        ([("/begin_weight_update", {}), ("/update_weights_from_tensor", {"data": b"cos\nsystem\n."})], "os.system"),
        ([("/begin_weight_update", {}), ("/update_weights_from_tensor", {"flush_cache": True})], "flush failed"),
    ],
)
def test_the_server_enforces_its_contract(tmp_path, calls, ends):
    save_file(Trainer().state_dict(), tmp_path / "model.safetensors")
    server = Double(tmp_path)
    server.refuses_flush = True
    for path, options in calls:
        data = options.pop("data", pickled("deltawire", b"{}"))
        body = {"serialized_named_tensors": [b64encode(data).decode()], "load_format": LOADER, "flush_cache": False}
        answer = httpx.post(server.url + path, json=body | options)
    assert answer.status_code == (500 if ends else 400)
    assert (ends or "") in (server.ended or "")
    assert (server.ended is None) == (ends is None)
    server.stop()
