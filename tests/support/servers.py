"""Real object stores on the loopback interface, for tests and benchmarks: seaweedfs (S3) and azurite (Azure)."""

import base64
import hmac
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from support.waiting import eventually

Running = TypeVar("Running")

HOST = "127.0.0.1"
BUCKET = "bucket"
WEED = Path(sys.executable).parent / "weed"
AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"

# The well-known development account of every Azure emulator; not a secret.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass
class Server:
    """A running server. `config` is what `open_store` needs to reach it."""

    port: int
    process: subprocess.Popen[bytes]
    create: Callable[[str], None]
    config: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return self.config["endpoint"]

    def make_bucket(self, name: str) -> None:
        self.create(name)

    def stop(self) -> None:
        """End the process and wait until its port is free again."""
        _stop(self.process)
        eventually(lambda: not is_open(self.port), "the port to be released")


@dataclass
class S3Server(Server):
    access_key: str = "testkey"
    secret: str = "testsecret"

    @property
    def environment(self) -> dict[str, str]:
        """What the command line needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret,
        }  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """After a kill: the same server on the same port with what it had on disk."""
        folder = Path(next(each for each in self.process.args if each.startswith("-dir=")).removeprefix("-dir="))
        self.process = _spawn(folder, self.process.args)
        _ready(self, folder, lambda: _make_s3_bucket(self.config, "ready"))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below the range from which the kernel takes those of outgoing connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


@contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """An S3 server that checks signatures and decides conditional writes."""
    with tempfile.TemporaryDirectory(prefix="weed-") as folder:
        server = _start(lambda: _start_seaweedfs(Path(folder)))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def azurite() -> Iterator[Server]:
    """An Azure Blob server; see `azurite_missing` for why it may not be there."""
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder:
        server = _start(lambda: _start_azurite(Path(folder)))
        try:
            yield server
        finally:
            server.stop()


def azurite_missing() -> str:
    """Why azurite cannot run here; empty if it can."""
    if shutil.which("node") is None:
        return "node is not installed"
    return "" if AZURITE.exists() else f"npm install --prefix {AZURITE.parents[2]} azurite"


def _start_seaweedfs(folder: Path) -> S3Server:
    access_key, secret = S3Server.access_key, S3Server.secret
    credentials = [{"accessKey": access_key, "secretKey": secret}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    roles = ["master", "volume", "filer", "s3"]
    ports = dict(zip([*roles, *(f"{role} grpc" for role in roles)], free_ports(8), strict=True))
    process = _spawn(folder, [
        str(WEED), "-logtostderr=true", "server", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}",
        *(f"-{role}.port={ports[role]}" for role in roles),
        *(f"-{role}.port.grpc={ports[f'{role} grpc']}" for role in roles),
        "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100", "-s3",
        "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder}/s3.json",
        f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock",
    ])  # fmt: skip
    config = {"endpoint": f"http://{HOST}:{ports['s3']}", "access_key_id": access_key, "secret_access_key": secret}
    server = S3Server(
        ports["s3"], process, lambda name: _make_s3_bucket(config, name), config | {"region": "us-east-1"}
    )
    _ready(server, folder, lambda: _make_s3_bucket(config, "ready"))
    return server


def _start_azurite(folder: Path) -> Server:
    (port,) = free_ports(1)
    process = _spawn(folder, [
        str(AZURITE), "--disableTelemetry", "--skipApiVersionCheck", "--blobHost", HOST, "--blobPort", str(port),
        "--silent", "--inMemoryPersistence",
    ])  # fmt: skip
    endpoint = f"http://{HOST}:{port}/{AZURE_ACCOUNT}"
    config = {"endpoint": endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
    server = Server(port, process, lambda name: _make_azure_container(endpoint, name), config)
    _ready(server, folder, lambda: _make_azure_container(endpoint, "ready"))
    return server


def _make_s3_bucket(config: dict[str, str], name: str) -> None:
    from obstore import sign
    from obstore.store import S3Store

    store = S3Store(name, config=config, client_options={"allow_http": True})
    url = sign(store, "PUT", "", timedelta(minutes=1))
    _put(url, {})


def _make_azure_container(endpoint: str, name: str) -> None:
    headers = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2021-12-02"}
    canonical = "".join(f"{key}:{value}\n" for key, value in headers.items())
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + canonical + resource
    digest = hmac.digest(base64.b64decode(AZURE_KEY), to_sign.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    _put(f"{endpoint}/{name}?restype=container", headers)


def _put(url: str, headers: dict[str, str]) -> None:
    """An empty PUT; that the thing exists already is as good."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request("PUT", url[url.index("/", 8) :], headers={"Content-Length": "0", **headers})
        response = connection.getresponse()
        answer = response.read().decode(errors="replace")
        if response.status not in (200, 201, 409):
            raise OSError(f"{response.status} {answer}")
    finally:
        connection.close()


def _spawn(folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)


def _start(start: Callable[[], Running]) -> Running:
    """Start a server; another program may take one of its ports first, so try again with others."""
    for _ in range(3):
        try:
            return start()
        except RuntimeError as error:
            reason = error
    raise reason


def _ready(server: Server, folder: Path, probe: Callable[[], None]) -> None:
    """Wait until the probe succeeds; a process that ends instead has left its reason in the log."""

    def answers() -> bool:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        try:
            probe()
        except OSError:
            return False
        return True

    try:
        eventually(answers, "the server to answer")
    except BaseException:
        _stop(server.process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
