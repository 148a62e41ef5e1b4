"""Names of tensors: which ones every file and document can hold, and which of them share their weights with others."""

import json
from collections.abc import Collection, Iterable, Mapping

# Where a header has its metadata, among the names of tensors; and a delta's metadata what it says of itself.
METADATA = "__metadata__"
PREFIX = "deltawire."
MOST_TIED_BYTES = 4_000_000


def check_names(names: Iterable[str]) -> None:
    """Refuse names that a header could not hold, or that would mean something else in it."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name is text, not {name!r} ({type(name).__name__}): rename it")
        if name == METADATA or name.startswith(PREFIX):
            raise ValueError(f"{name!r} cannot be the name of a tensor: {METADATA} and {PREFIX}* are taken, rename it")
        if not is_text(name):
            raise ValueError(f"{name!r} cannot be the name of a tensor: UTF-8 has no lone surrogates, rename it")


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_ties(tied: Mapping[str, str], names: Collection[str] | None = None) -> None:
    """Refuse ties that lead nowhere: a tied name has no weights of its own, so it must lead to one that has.

    `names` are the tensors that have weights, where they are known; tied names may be among them, as in a module.
    """
    check_names(tied)
    check_names(tied.values())
    for name, to in tied.items():
        if to in tied:
            raise ValueError(f"{name!r} is tied to {to!r}, which is tied itself: name the tensor that has the weights")
        if names is not None and to not in names:
            raise ValueError(f"{name!r} is tied to {to!r}, which is not among the weights")


def resolve_ties(tied: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Ties as files and documents hold them, from ties as a caller gives them: a chain of them leads to its end."""
    check_names(tied)
    check_names(tied.values())
    resolved = {}
    for name in tied:
        to, seen = tied[name], {name}
        while to in tied and to not in seen:
            seen.add(to)
            to = tied[to]
        if to in seen:
            raise ValueError(f"{name!r} is tied in a circle, so nothing says which weights it has")
        resolved[name] = to
    check_ties(resolved, names)
    if (size := len(json.dumps(resolved))) > MOST_TIED_BYTES:
        raise ValueError(f"{len(tied)} tied names take {size} bytes, a manifest holds {MOST_TIED_BYTES}")
    return resolved
