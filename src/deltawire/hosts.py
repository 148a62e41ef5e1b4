"""Allowed `Host` names of our web servers, as protection against DNS rebinding: a foreign web page must not reach them
through a host name that its owner later points at this machine.
"""

import ipaddress
from collections.abc import Sequence

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


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
        raise TypeError("allowed hosts are a list of names, not one text")
    for name in names:
        plain = name.removeprefix("*.")
        if not plain or "*" in plain or "/" in plain or (":" in plain and not plain.endswith("]")):
            raise ValueError(f"{name!r} is not the name of a host: give it without scheme and port, or as *.domain")
    if bound in EVERYWHERE and not names:
        return ["*"]
    own = () if is_loopback(bound) else (bound, f"[{bound}]")
    return list(dict.fromkeys([*LOOPBACK, *own, *names]))
