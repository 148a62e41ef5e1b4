"""TRL's own AsyncGRPOTrainer, a real vLLM server and a real S3 store, all of it on the CPU."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from safetensors.torch import load_file

from deltawire.run.run import Run
from deltawire.store import open_store
from support import ROOT
from support.servers import BUCKET
from support.trl_run import save_policy
from support.vllm_reference import ENVIRONMENT, checksums
from support.vllm_server import serving
from support.waiting import PATIENCE

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

    def __init__(self, name, folder, server, policy, s3_server, **options):
        self.folder, self.server = folder, server
        url = f"s3://{BUCKET}/{name}"
        self.run = Run(open_store(url, config=s3_server.config))
        self._options = {"model": str(policy), "server": server.url, "store": url, "output": str(folder), **options}
        self._environment = {**os.environ, **ENVIRONMENT, **s3_server.environment, "TOKENIZERS_PARALLELISM": "false"}

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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openenv") is None, reason="needs pip install 'deltawire[wordle]'")
def test_the_wordle_example(tmp_path, server, policy, s3_server):
    command = [sys.executable, "-m", "deltawire_demo.wordle", "--port", "0"]
    with (tmp_path / "wordle").open("w") as log:
        games = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = games.stdout.readline().strip()
        training = Training("wordle", tmp_path, server, policy, s3_server, env=url)
        told = training.train(3)
    finally:
        games.terminate()
        games.wait(PATIENCE)
        games.stdout.close()
    # The server may have the weights of another run at first.
    assert training.is_served()
    steps = steps_of(told)
    assert len(steps) == 3
    assert sum(each.get("tools/guess/call_total", 0) for each in steps) > 0
    assert any(each["rewards/Wordle"] != 0 for each in steps)
    assert all(each["deltawire/engines/lag_max"] <= 1 for each in steps)
