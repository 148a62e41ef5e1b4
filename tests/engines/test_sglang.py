"""SGLang as an engine, against a loopback server that enforces its contract: `sglang_double`."""

import csv
import io
import os
import re
import shlex
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

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
from support.sglang_double import HIDDEN, PROMPT, Double, Scaling, Served, Trainer, Unpickler
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
    run = start(keeps_prefixes=True)
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


def test_a_cache_that_an_old_server_keeps(start):
    run = start(release="0.5.17", keeps_prefixes=True)
    run.attach().pull()
    run.step()
    with run.traffic(), pytest.raises(EngineRejected, match=r"0\.5\.17 does not empty it while requests wait"):
        run.replica.pull()
    assert (run.server.version, run.server.paused, run.server.serves(Trainer())) == ("0", None, True)
    run.replica.pull()
    assert run.is_current(1)


def test_an_older_server_is_refused(start):
    run = start(release="0.5.16")
    with pytest.raises(EngineRejected, match=r"SGLang 0\.5\.16 is too old"):
        run.attach().pull()


def test_a_newer_server_is_tried(start, caplog):
    run = start(release="0.6.0")
    run.attach().pull()
    assert run.is_current(0)
    assert "SGLang 0.6.0 is untested" in caplog.text


class Lacking(Served):
    """Has a parameter that no tensor of the run is loaded into."""

    def __init__(self, rank, ranks):
        super().__init__(rank, ranks)
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def test_a_parameter_that_the_run_does_not_fill_is_refused_by_name(start):
    run = start(model=Lacking)
    with pytest.raises(EngineRejected, match="the run fills 0 of the 3 elements of scale"):
        run.attach().pull()
    assert run.server.paused is None


class Threaded(Served):
    """Loads its weights with a pool of threads, as SGLang's DeepSeek models do."""

    def load_weights(self, weights):
        with ThreadPoolExecutor() as pool:
            done = [pool.submit(self.load_one, name, value) for name, value in weights]
            for each in done:
                each.result()
        self.post_load_weights()


class Widened(Served):
    """Keeps a bf16 weight in fp32, as SGLang does with the bias of a router."""

    def __init__(self, rank, ranks):
        super().__init__(rank, ranks)
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)


@pytest.mark.parametrize("model", [Threaded, Widened])
def test_other_ways_of_loading_are_followed(start, model):
    run = start(model=model, ranks=2)
    run.attach().pull()
    for _ in range(2):
        run.step()
        run.replica.pull()
    for rank in run.server.models:
        expected = model(rank.rank, 2)
        expected.load_weights(run.trainer.state_dict().items())
        assert all(torch.equal(value, expected.tensors()[name]) for name, value in rank.tensors().items())
    assert run.server.calls.count("/update_weights_from_disk") == 1


@pytest.mark.parametrize(("attribute", "what"), [("quant_config", "quantizes"), ("quant_method", "FlashInfer")])
def test_weights_that_are_kept_otherwise_are_refused_by_name(start, attribute, what):
    run = start()
    setattr(run.server.models[0], attribute, SimpleNamespace(use_flashinfer_trtllm_moe=True))
    with pytest.raises(EngineRejected, match=what):
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
    with pytest.raises(ValueError, match="mode must be one of patch, disk"):
        SglangEngine("http://127.0.0.1:1", mode="post")
    with pytest.raises(ValueError, match="running_requests must be one of"):
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


FLUSHES = ("/update_weights_from_tensor", {"flush_cache": True})


@pytest.mark.parametrize(
    ("release", "calls", "ends"),
    [
        ("0.5.23", [("/update_weights_from_tensor", {})], None),
        ("0.5.23", [("/end_weight_update", {})], None),
        ("0.5.23", [("/begin_weight_update", {}), ("/begin_weight_update", {})], None),
        ("0.5.23", [("/begin_weight_update", {}), FLUSHES], None),
        ("0.5.17", [FLUSHES], "flush failed"),
        ("0.5.17", [("/update_weights_from_tensor", {"load_format": "os.system"})], "os.system"),
        ("0.5.17", [("/update_weights_from_tensor", {"data": b"cos\nsystem\n."})], "os.system"),
    ],
)
def test_the_server_enforces_its_contract(tmp_path, release, calls, ends):
    save_file(Trainer().state_dict(), tmp_path / "model.safetensors")
    server = Double(tmp_path, release=release)
    server.refuses_flush = True
    for path, given in calls:
        options = dict(given)
        data = options.pop("data", pickled("deltawire", b"{}"))
        body = {"serialized_named_tensors": [b64encode(data).decode()], "load_format": LOADER, "flush_cache": False}
        answer = httpx.post(server.url + path, json=body | options)
    assert answer.status_code == (500 if ends else 400)
    assert (ends or "") in (server.ended or "")
    assert (server.ended is None) == (ends is None)
    server.stop()


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    """As on a GPU, with models that are small and a server that is this double."""
    command = [
        sys.executable, ROOT / "benchmarks" / "sglang_gpu.py", "--server", "support.sglang_launch", "--models", "dry",
        "dry-experts", "--rounds", "4", "--settle", "0.5", "--streams", "2", "--out", tmp_path,
    ]  # fmt: skip
    paths = [str(ROOT / each) for each in ("src", "tests", "benchmarks")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "sglang_gpu.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert [row["event"] for row in rows if row["event"]] == ["killed between two updates", "killed during an update"]
    assert len(rows) == 10
    assert {(row["wrong"], row["others"]) for row in rows} == {("0", "0")}
