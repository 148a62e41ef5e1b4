"""The image of deploy/spaces/vllm without an image: its files, on other ports of this machine, and its proxy alone."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from support import ROOT
from support.servers import free_ports
from support.web_servers import NGINX


def lay_out(folder, port, vllm_port, agent_port):
    """The files that the image has, with other ports."""
    for name in ("nginx.conf", "proxy.sh", "start.sh"):
        text = (ROOT / "deploy/spaces/vllm" / name).read_text().replace("listen 7860", f"listen 127.0.0.1:{port}")
        for own, other in ((8000, vllm_port), (9100, agent_port)):
            text = re.sub(rf"(:|--port |--listen ){own}\b", rf"\g<1>{other}", text)
        (folder / name).write_text(text)


def search_path():
    """Where an image has nginx, deltawire and vLLM."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:{Path(NGINX).parent}"


@contextmanager
def proxied(folder, vllm_port, agent_port, *, api_token, nudge_token=""):
    """The port of the proxy, and its process."""
    (port,) = free_ports(1)
    lay_out(folder, port, vllm_port, agent_port)
    environment = {
        **os.environ, "API_TOKEN": api_token, "DELTAWIRE_TOKEN": nudge_token, "TMPDIR": str(folder),
        "PATH": search_path(),
    }  # fmt: skip
    process = subprocess.Popen(["bash", str(folder / "proxy.sh")], env=environment)
    try:
        yield port, process
    finally:
        process.terminate()
        process.wait(120)
