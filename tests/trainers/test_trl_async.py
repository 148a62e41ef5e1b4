"""TRL's own AsyncGRPOTrainer, a real vLLM server and a real S3 store, all of it on the CPU."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from base64 import b64encode
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from safetensors.torch import load_file

import deltawire
from deltawire.run.run import Run
from deltawire.store import open_store
from support import ROOT
from support.proxy import lay_out, search_path
from support.servers import BUCKET, HOST, free_ports, is_open
from support.trl_run import save_policy
from support.vllm_reference import ENVIRONMENT, checksums
from support.vllm_server import serving
from support.waiting import PATIENCE, eventually
from support.web_servers import NGINX

if find_spec("trl") is None or find_spec("vllm") is None:  # the programs that are started import them
    pytest.skip("TRL or vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm
SECONDS = 400
# TRL seeds its requests, and on the CPU vLLM 0.32 ends when it computes a seeded prompt in parts.
SERVED = [
    "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill", "--max-model-len", "4096",
    "--max-num-batched-tokens", "8192", "--max-num-seqs", "16",
]  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder)
    return folder


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory, vllm_pool):
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(
        policy, arguments=["--served-model-name", str(policy), *SERVED], log=log, nursery=vllm_pool.nursery
    ) as running:
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


needs_wordle = pytest.mark.skipif(find_spec("openenv") is None, reason="needs pip install 'deltawire[wordle]'")


def assert_it_played(told):
    steps = steps_of(told)
    assert len(steps) == 3
    assert sum(each.get("tools/guess/call_total", 0) for each in steps) > 0
    assert any(each["rewards/Wordle"] != 0 for each in steps)
    assert all(each["deltawire/engines/lag_max"] <= 1 for each in steps)


@contextmanager
def running(command, folder, **environment):
    """What an image starts, in a folder of its own, with the log there."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


def wordle_command(port):
    """That of the image, on the loopback interface."""
    (line,) = re.findall(r"^CMD (.*)$", (ROOT / "deploy/spaces/wordle/Dockerfile").read_text(), re.MULTILINE)
    swapped = {"python": sys.executable, "0.0.0.0": HOST, "7860": str(port)}
    return [swapped.get(word, word) for word in json.loads(line)]


@pytest.mark.slow
@needs_wordle
def test_the_wordle_example(tmp_path, server, policy, s3_server):
    (port,) = free_ports(1)
    (tmp_path / "wordle").mkdir()
    with running(wordle_command(port), tmp_path / "wordle"):
        eventually(lambda: is_open(port))
        training = Training("wordle", tmp_path, server, policy, s3_server, env=f"http://{HOST}:{port}")
        told = training.train(3)
    # The server may have the weights of another run at first.
    assert training.is_served()
    assert_it_played(told)


API, NUDGE, WORDLE = TOKENS = "clients-of-the-server", "nudges-of-the-agent", "players-of-wordle"


@pytest.mark.slow
@needs_wordle
@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_three_machines_with_tokens_between_them(tmp_path, policy, s3_server, private):
    """The commands, names and proxy of deploy/spaces, each machine a port: who has no token is refused everywhere."""
    folders = {name: tmp_path / name for name in ("vllm", "wordle", "trainer")}
    for each in folders.values():
        each.mkdir()
    port, vllm, agent, wordle = free_ports(4)
    url, games, store = f"http://{HOST}:{port}", f"http://{HOST}:{wordle}", f"s3://{BUCKET}/machines"
    lay_out(folders["vllm"], port, vllm, agent)
    common = {**ENVIRONMENT, **s3_server.environment, "PATH": search_path(), "TMPDIR": private}
    own = {
        "STORE_URL": store, "API_TOKEN": API, "DELTAWIRE_TOKEN": NUDGE, "MODEL_NAME": str(policy),
        "MIRROR": str(folders["vllm"] / "mirror"),
        "VLLM_ARGS": f"{' '.join(SERVED)} --dtype bfloat16 --enforce-eager --kv-cache-memory-bytes {64 << 20}",
        "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    publish = ["deltawire", "publish", str(policy), "--to", store]
    subprocess.run(publish, env={**os.environ, **common}, check=True, capture_output=True)
    tokens = {"API_TOKEN": API, "DELTAWIRE_TOKEN": NUDGE, "WORDLE_TOKEN": WORDLE}
    with (
        running(["bash", "start.sh"], folders["vllm"], **(common | own)) as server,
        running(wordle_command(wordle), folders["wordle"], WORDLE_TOKEN=WORDLE) as environment,
        httpx.Client(timeout=60, trust_env=False) as client,
    ):

        def asked(method, address, token=None):
            """The status of a request."""
            assert (server.poll(), environment.poll()) == (None, None), (folders["vllm"] / "log").read_text()[-4000:]
            headers = {"Content-Length": "2"} | ({"Authorization": f"Bearer {token}"} if token else {})
            try:
                return client.request(method, address, headers=headers, content=b"{}").status_code
            except httpx.TransportError:
                return None

        eventually(lambda: asked("GET", f"{url}/health", API) == 200)
        place = SimpleNamespace(url=url)
        options = {"env": games, "agent": url, "log_level": "INFO"}
        training = Training("machines", folders["trainer"], place, policy, s3_server, tokens, **options)
        told = training.train(3)
        latest = training.run.latest()
        assert told["version"] == latest >= 3
        assert training.run.manifest(0).hop.base is None, "what the servers started from"

        def status():
            return client.get(f"{url}/status", headers={"Authorization": f"Bearer {NUDGE}"}).json()

        eventually(lambda: status()["version"] == latest)
        weights = load_file(folders["trainer"] / "final.safetensors")
        assert status()["digest"] == str(deltawire.digest(weights)), "what the server's workers have"

        # Strangers, and those who have the token of another part.
        for path in ("v1/models", "v1/completions", "health"):
            assert [asked("POST", f"{url}/{path}", token) for token in (None, NUDGE, WORDLE)] == [401] * 3, path
        for path in ("nudge", "status"):
            assert [asked("POST", f"{url}/{path}", token) for token in (None, API, WORDLE)] == [401] * 3, path
        for path in ("metrics", "pause", "server_info", "collective_rpc", "deltawire/status", "deltawire/commit"):
            assert [asked("POST", f"{url}/{path}", token) for token in (None, API, NUDGE)] == [404] * 3, path
        for path in ("", "docs", "openapi.json", "reset", "state", "ws", "batch/reset", "batch/step"):
            assert [asked("POST", f"{games}/{path}", token) for token in (None, API, NUDGE)] == [401] * 3, path
        assert asked("POST", f"{games}/batch/reset", WORDLE) == 422
        assert asked("POST", f"{url}/nudge", NUDGE) == 202
        # Also on the machine itself, and at the store.
        assert asked("POST", f"http://{HOST}:{vllm}/deltawire/commit") == 401
        assert asked("POST", f"http://{HOST}:{agent}/nudge") == 401
        assert asked("GET", f"{s3_server.endpoint}/{BUCKET}/machines/run.json") == 403
    assert_it_played(told)
    # Logs, checkpoints and the arguments in them have no token.
    assert "INFO:trl" in (folders["trainer"] / "log").read_text()
    assert tellers(tmp_path) == []
    (kept,) = tellers(Path(private))
    assert (kept.name, kept.stat().st_mode & 0o077) == ("token.conf", 0), "the proxy's, which nobody else can read"


@pytest.fixture
def private():
    """A folder for temporary files, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def tellers(folder):
    """The files with a token in them, as it is or as a URL's password is sent."""
    words = [word for token in TOKENS for word in (token.encode(), b64encode(f"key:{token}".encode()))]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(word in path.read_bytes() for word in words)]
