"""TRL's own AsyncGRPOTrainer, a real vLLM server and a real S3 store, all of it on the CPU."""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import requests
from safetensors.torch import load_file

from deltawire.run.run import Run
from deltawire.store import open_store
from support import ROOT
from support.proxy import proxied
from support.servers import BUCKET, free_ports
from support.trl_run import save_policy
from support.vllm_reference import ENVIRONMENT, checksums
from support.vllm_server import serving
from support.waiting import PATIENCE, eventually
from support.web_servers import NGINX

if find_spec("trl") is None or find_spec("vllm") is None:  # the programs that are started import them
    pytest.skip("TRL or vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm
SECONDS = 400


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder)
    return folder


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory, vllm_pool):
    # TRL seeds its requests, and on the CPU vLLM 0.32 ends when it computes a seeded prompt in parts.
    more = [
        "--served-model-name", str(policy), "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill",
        "--max-model-len", "4096", "--max-num-batched-tokens", "8192", "--max-num-seqs", "16",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(policy, arguments=more, log=log, nursery=vllm_pool.nursery) as running:
        yield running


class Training:
    """A run, and the programs that train it."""

    def __init__(self, name, folder, server, policy, s3_server, tokens=None, **options):
        self.folder, self.server = folder, server
        url = f"s3://{BUCKET}/{name}"
        self.run = Run(open_store(url, config=s3_server.config))
        self._options = {"model": str(policy), "server": server.url, "store": url, "output": str(folder), **options}
        self._environment = {**os.environ, **ENVIRONMENT, **s3_server.environment, "TOKENIZERS_PARALLELISM": "false"}
        self._environment |= tokens or {}

    def train(self, steps, resume=None, **transfer):
        options = {**self._options, "steps": steps, "resume": resume, "transfer": transfer}
        done = subprocess.run(
            [sys.executable, ROOT / "tests/support/trl_run.py", json.dumps(options)], env=self._environment,
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        (self.folder / "log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    def is_served(self):
        """Whether the server has what the trainer has, bit for bit, and calls it by its version."""
        weights = load_file(self.folder / "final.safetensors")
        return (self.server.weight_version, self.server.checksums()) == (str(self.run.latest()), checksums(weights))


def steps_of(told):
    return [each for each in told["history"] if "reward" in each]


def test_it_trains_and_the_server_follows_also_after_a_restart(tmp_path, server, policy, s3_server):
    training = Training("trl", tmp_path, server, policy, s3_server)
    assert server.weight_version == "default"
    told = training.train(4)
    assert training.is_served()
    run, name = training.run, server.url.removeprefix("http://")
    first, latest = run.id, run.latest()
    assert told["served"] == {name: latest}
    assert (told["version"], told["syncs"], told["model_version"]) == (latest, 5, 5)
    assert 0 < run.manifest(latest).hop.num_changed < run.manifest(latest).num_elements / 2
    steps = steps_of(told)
    assert len(steps) == 4
    # A step is logged after its sync.
    metadata = {"sync": 5, "reward": steps[2]["reward"]}
    assert (run.manifest(latest).step, run.manifest(latest).metadata) == (4, metadata)
    assert all(0 < each["reward"] < 1 for each in steps)
    # Samples of the weights that were trained have the probabilities that the server said.
    assert math.isclose(steps[0]["ratio"], 1, abs_tol=0.05)
    assert [each["deltawire/transfer/syncs"] for each in steps] == [2, 3, 4, 5]
    assert {"deltawire/publish/density", "deltawire/engines/count"} <= steps[-1].keys()

    told = training.train(6, resume=str(tmp_path / "checkpoint-4"), max_lag=0)
    assert training.is_served()
    assert (run.id, run.latest()) == (first, latest + 2)
    # What the checkpoint has was in the store already; then each step is a delta to the one before.
    assert [run.manifest(latest + number).hop.base for number in (1, 2)] == [latest, latest + 1]
    assert [run.manifest(latest + number).step for number in (1, 2)] == [5, 6]
    steps = steps_of(told)[-2:]
    assert [each[f"deltawire/engine/{name}/version"] for each in steps] == [latest + 1, latest + 2]
    assert [each["deltawire/engines/lag_max"] for each in steps] == [0, 0]
    assert (told["syncs"], told["model_version"]) == (3, 8)


@contextmanager
def program(log, module, *arguments, **environment):
    """A program as in an image, and the first line that it prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


needs_wordle = pytest.mark.skipif(find_spec("openenv") is None, reason="needs pip install 'deltawire[wordle]'")


@pytest.mark.slow
@needs_wordle
@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_the_wordle_example_with_tokens_between_its_parts(tmp_path, server, policy, s3_server):
    """Three machines as ports: an environment, a server with its agent behind the proxy of deploy/, and the trainer."""
    tokens = {"API_TOKEN": "clients-of-the-server", "DELTAWIRE_TOKEN": "nudges-of-the-agent"}
    (port,) = free_ports(1)
    store = f"s3://{BUCKET}/tokens"
    attach = ["attach", "--engine", "vllm", "--url", server.url, "--from", store, "--listen", port, "--poll", "60"]
    environment = {**ENVIRONMENT, **s3_server.environment, "DELTAWIRE_TOKEN": tokens["DELTAWIRE_TOKEN"]}
    with (
        program(tmp_path / "wordle", "deltawire_demo.wordle", "--port", "0") as games,
        program(tmp_path / "agent", "deltawire.cli", *attach, **environment),
        proxied(tmp_path, server.url.rpartition(":")[2], port, api_token=tokens["API_TOKEN"],
                nudge_token=tokens["DELTAWIRE_TOKEN"]) as (proxy, _),
    ):  # fmt: skip
        url = f"http://127.0.0.1:{proxy}"
        options = {"env": games.stdout.readline().strip(), "agent": url, "server": url}
        training = Training("tokens", tmp_path, server, policy, s3_server, tokens, **options)
        told = training.train(3)
        eventually(training.is_served)
        # Strangers are refused: who asks for tokens, who nudges, who asks for what the agent knows.
        for path in ("v1/models", "health", "nudge", "status"):
            assert requests.post(f"{url}/{path}", timeout=60).status_code == 401, path
        for path in ("metrics", "pause", "deltawire/update"):
            assert requests.post(f"{url}/{path}", timeout=60).status_code == 404, path
    steps = steps_of(told)
    assert len(steps) == 3
    # Polls are rare: it was nudged, or would be behind.
    assert all(each["deltawire/engines/lag_max"] <= 1 for each in steps)
    secrets = (tmp_path / "log").read_text() + json.dumps(told)
    assert tokens["API_TOKEN"] not in secrets


@pytest.mark.slow
@needs_wordle
def test_the_wordle_example(tmp_path, server, policy, s3_server):
    with program(tmp_path / "wordle", "deltawire_demo.wordle", "--port", "0") as games:
        training = Training("wordle", tmp_path, server, policy, s3_server, env=games.stdout.readline().strip())
        told = training.train(3)
    # The server may have the weights of another run at first.
    assert training.is_served()
    steps = steps_of(told)
    assert len(steps) == 3
    assert sum(each.get("tools/guess/call_total", 0) for each in steps) > 0
    assert any(each["rewards/Wordle"] != 0 for each in steps)
    assert all(each["deltawire/engines/lag_max"] <= 1 for each in steps)
