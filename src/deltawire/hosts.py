"""Which names our web servers answer to: a page from elsewhere must not reach them under a name of its own, which its
owner can point at this machine once a browser has loaded the page.
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
    """The names to answer to, for a server that listens on `bound`: its own, those of this machine, and `names`.

    One that listens everywhere answers to all, unless names are given: nobody knows what it is called.
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
