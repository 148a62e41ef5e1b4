"""The install lines of the Dockerfiles, run in fresh virtual environments, and what the images start."""

import json
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from deltawire import __version__ as deltawire_version
from support import ROOT
from support.servers import free_ports

pytestmark = [pytest.mark.process, pytest.mark.slow]

SPACES = ROOT / "deploy" / "spaces"


def run(*command, **options):
    done = subprocess.run(
        [str(each) for each in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for_health(process, port, is_it):
    """What a process answers to /health, once it is what is waited for."""
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        with suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            if is_it(answer):
                return answer
        time.sleep(0.2)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The project as it would be in a registry."""
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """Does what a Dockerfile's RUN lines do with pip, in an environment of its own; the Python of it."""

    def install(name):
        folder = tmp_path_factory.mktemp(name) / "venv"
        run(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        (line,) = re.findall(r"^RUN pip install (.*)$", (SPACES / name / "Dockerfile").read_text(), re.MULTILINE)
        # An environment has no user's folder. vLLM for a GPU is gigabytes; the tests have the one for the CPU.
        words = [word for word in shlex.split(line) if word != "--user" and not word.startswith("vllm")]
        assert any(word.startswith("deltawire[") for word in words)
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--find-links", wheels, *words)
        return python

    return install


def test_the_wordle_image(installed):
    python = installed("wordle")
    (line,) = re.findall(r"^CMD (.*)$", (SPACES / "wordle" / "Dockerfile").read_text(), re.MULTILINE)
    words, (port,) = json.loads(line), free_ports(1)
    words[0] = str(python)
    words[words.index("--host") + 1], words[words.index("--port") + 1] = "127.0.0.1", str(port)
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd="/")
    try:
        wait_for_health(process, port, lambda answer: answer.status_code == 200)
    finally:
        process.terminate()
        process.wait(120)


def test_the_vllm_image(installed, tmp_path):
    """Agent and stores, without torch: a run is published, pulled, and an agent waits for its server."""
    python = installed("vllm")
    deltawire = Path(python).with_name("deltawire")
    assert deltawire_version in run(deltawire, "--version")
    program = (
        "import numpy as np; from safetensors.numpy import save_file; "
        "save_file({'a': np.arange(8, dtype=np.float32)}, 'base.safetensors')"
    )
    run(python, "-c", program, cwd=tmp_path)
    run(deltawire, "publish", "base.safetensors", "--to", "run", cwd=tmp_path)
    run(deltawire, "pull", "run", "--to", "mirror", cwd=tmp_path)
    assert (tmp_path / "mirror").is_dir()
    (port,) = free_ports(1)
    agent = subprocess.Popen(
        [deltawire, "attach", "--engine", "vllm", "--url", "http://127.0.0.1:9", "--from", "run",
         "--listen", str(port)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    try:
        answer = wait_for_health(agent, port, lambda answer: answer.json()["error"] == "EngineUnavailable")
        assert answer.status_code == 503
    finally:
        agent.terminate()
        agent.communicate(timeout=180)
