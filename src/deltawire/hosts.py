"""URLs that users give, and what our web servers share: how they listen, and which `Host` names they accept.

The latter protects against DNS rebinding: a foreign web page must not reach them through a host name that its owner
later points at this machine.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from urllib.parse import SplitResult, urlsplit

from deltawire.errors import AddressUnavailable
from deltawire.redact import redacted

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104
# Control characters, and what is no text.
NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def split_url(url: str) -> SplitResult:
    """The parts of a URL, or a ValueError that names it, as that of `urlsplit` does not."""
    shown = redacted(repr(url))
    if NO_TEXT.search(url):  # some of which would be left out silently
        raise ValueError(f"{shown} is not a URL: it has a control character")
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port
    except ValueError:  # which may show a part of a password
        raise ValueError(f"{shown} is not a URL: check its host and port") from None
    return parts


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def answered_hosts(bound: str, names: Sequence[str] = ()) -> list[str]:
    """The host names that a server listening on `bound` accepts: `bound`, the loopback names, and `names`.

    A server that listens on all interfaces accepts every name unless `names` are given, as its own name is unknown.
    """
    if isinstance(names, str):
        raise TypeError("allowed_hosts must be a list of names, not a string")
    for name in names:
        plain = name.removeprefix("*.")
        if not plain or "*" in plain or "/" in plain or (":" in plain and not plain.endswith("]")):
            raise ValueError(f"{name!r} is not a host name: write it without scheme and port, or as *.domain")
    if bound in EVERYWHERE and not names:
        return ["*"]
    own = () if is_loopback(bound) else (bound, f"[{bound}]")
    return list(dict.fromkeys([*LOOPBACK, *own, *names]))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port that is taken fails at once; port 0 takes a free one."""
    if not host:
        raise ValueError("give a host to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all addresses")
    if not 0 <= port < 1 << 16:
        raise ValueError(f"a port must be between 0 and 65535, not {port}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise AddressUnavailable(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another, or 0 for a free port",
            host=host, port=port,
        ) from error  # fmt: skip


def web_server(application: Any, *, grace_seconds: int) -> Any:
    """A server for a web application, which leaves logging and signals to the program that it runs in."""
    import uvicorn

    config = uvicorn.Config(
        application, log_config=None, lifespan="off", loop="asyncio", ws="none", proxy_headers=False,
        timeout_graceful_shutdown=grace_seconds,
    )  # fmt: skip
    server: Any = uvicorn.Server(config)
    server.capture_signals = nullcontext
    return server
