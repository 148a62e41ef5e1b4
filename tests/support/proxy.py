"""The proxy of deploy/spaces/vllm, started as in the image, on ports of this machine."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

from support import ROOT
from support.servers import free_ports
from support.web_servers import NGINX


@contextmanager
def proxied(folder, vllm_port, agent_port, *, api_token, nudge_token=""):
    """The port of the proxy, and its process."""
    (port,) = free_ports(1)
    for name in ("nginx.conf", "proxy.sh"):
        text = (ROOT / "deploy/spaces/vllm" / name).read_text().replace("listen 7860", f"listen 127.0.0.1:{port}")
        (folder / name).write_text(text.replace(":8000", f":{vllm_port}").replace(":9100", f":{agent_port}"))
    environment = {
        **os.environ, "API_TOKEN": api_token, "DELTAWIRE_TOKEN": nudge_token, "TMPDIR": str(folder),
        "PATH": f"{os.environ['PATH']}:{Path(NGINX).parent}",
    }  # fmt: skip
    process = subprocess.Popen(["bash", str(folder / "proxy.sh")], env=environment)
    try:
        yield port, process
    finally:
        process.terminate()
        process.wait(120)
