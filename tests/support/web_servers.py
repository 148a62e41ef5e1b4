"""Web servers on the loopback interface: a real nginx, and servers that answer whatever they are told to."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from support import ROOT
from support.servers import HOST, free_ports, is_open
from support.waiting import eventually

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

# Serves a folder as any web server does, and says in its log what it was asked for.
FILES = """
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
    log_format asked '$status $request_method $uri $http_range';
    access_log {folder}/access.log asked;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{ listen {host}:{port}; root {root}; }}
}}
"""


class Nginx:
    """A real nginx, with a group of processes of its own, which can be killed and started again."""

    def __init__(self, folder: Path, port: int, command: list[str], **environment: str) -> None:
        self.folder, self.port, self.url = folder, port, f"http://{HOST}:{port}"
        self._command, self._environment = command, environment
        self.start()

    def start(self) -> None:
        with open(self.folder / "output", "ab") as output:
            self._process = subprocess.Popen(
                self._command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **self._environment},
            )  # fmt: skip
        eventually(lambda: is_open(self.port) or self._process.poll() is not None, "nginx to listen")
        assert self._process.poll() is None, (self.folder / "output").read_text()[-2000:]

    def kill(self) -> None:
        """End all its processes at once, without a word."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
        self._process.wait()
        eventually(lambda: not is_open(self.port), "the port to be released")

    def asked(self) -> list[str]:
        """What was asked for so far: `200 GET /key range`."""
        return (self.folder / "access.log").read_text().splitlines()


@contextmanager
def file_server(folder: Path) -> Iterator[Nginx]:
    """Serves what is in `folder/root`."""
    (port,) = free_ports(1)
    root = folder / "root"
    root.mkdir(parents=True, exist_ok=True)
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(FILES.format(folder=folder, root=root, host=HOST, port=port, user=user))
    server = Nginx(folder, port, [str(NGINX), "-p", str(folder), "-e", "error.log", "-c", "nginx.conf"])
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def site_cache(folder: Path, origin: str, **environment: str) -> Iterator[Nginx]:
    """The cache of deploy/site-cache, on ports of its own."""
    ports = free_ports(2)
    folder.mkdir(parents=True)
    user = "user root;" if os.getuid() == 0 else ""
    config = (ROOT / "deploy/site-cache/nginx.conf").read_text().replace("listen 8080", f"listen {HOST}:{ports[0]}")
    (folder / "nginx.conf").write_text(f"{user}\n{config.replace(':8081', f':{ports[1]}')}")
    shutil.copy(ROOT / "deploy/site-cache/start.sh", folder)
    places = {"TMPDIR": str(folder), "CACHE_FOLDER": str(folder / "cache"), "ORIGIN": origin}
    path = f"{os.environ['PATH']}:{Path(NGINX).parent}"
    server = Nginx(folder, ports[0], ["sh", str(folder / "start.sh")], PATH=path, **places, **environment)
    try:
        yield server
    finally:
        server.stop()


class Served:
    """A store that is written as a folder, and read through a web server."""

    conditional = True

    def __init__(self, folder, web):
        self.put, self.create, self.list, self.delete = folder.put, folder.create, folder.list, folder.delete
        self.get, self.get_range, self.stat, self.url = web.get, web.get_range, web.stat, web.url


@contextmanager
def answering(answer, tls=None):
    """A server that answers each request, given as text, with the bytes that `answer` gives, and closes; its port.

    `answer` may also be a generator, of which everything is sent until the client has gone; `tls` is an SSLContext.
    """
    with socket.create_server((HOST, 0)) as listener:

        def serve():
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(line,), daemon=True).start()

        def talk(line):
            with suppress(OSError), line if tls is None else tls.wrap_socket(line, server_side=True) as line:
                given = answer(line.recv(65536).decode())
                for piece in [given] if isinstance(given, bytes) else given:
                    line.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def certificate(folder):
    """A server's context, with a certificate of its own in `folder`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    # nginx compares an address as a name.
    host = x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST)), x509.DNSName(HOST)])
    signed = made.add_extension(host, critical=True).sign(key, hashes.SHA256())
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate").write_bytes(signed.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate", folder / "key")
    return context
