"""Names of tensors: which ones are allowed, and which are tied, that is, share the weights of another name."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

# The key of the metadata among the tensor names of a header, and the prefix of deltawire's own keys in the metadata.
METADATA = "__metadata__"
PREFIX = "deltawire."
MOST_TIED_BYTES = 4_000_000

# Names that share the weights of other names, mapped to those.
Ties = Mapping[str, str]

# What wrappers add to parameter names: data parallel; torch.compile, activation checkpointing, FSDP; PEFT.
_WRAPPERS = re.compile(
    r"^(?:module\.)+|(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
    r"|^base_model\.model\.|(?<=\.)base_layer\."
)


def check_names(names: Iterable[str]) -> None:
    """Reject names that a header cannot store, or that are reserved in it."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a string, not {name!r} ({type(name).__name__}): rename it")
        if name == METADATA or name.startswith(PREFIX):
            raise ValueError(
                f"{name!r} cannot be a tensor's name, since {METADATA} and {PREFIX}* are reserved: rename it"
            )
        if not is_text(name):
            raise ValueError(f"{name!r} cannot be a tensor's name, since it is not valid UTF-8: rename it")


def is_text(text: str) -> bool:
    """Whether the text can be encoded as UTF-8."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def check_ties(tied: Ties, names: Collection[str] | None = None) -> None:
    """Reject tied names that do not refer to a tensor with weights of its own.

    `names` are the tensors that have weights, if known; tied names may be among them, as in a module.
    """
    check_names([*tied, *tied.values()])
    for name, to in tied.items():
        if to in tied:
            raise ValueError(f"{name!r} is tied to {to!r}, which is tied itself: name the tensor that has the weights")
        if names is not None and to not in names:
            raise ValueError(f"{name!r} is tied to {to!r}, which is not among the weights")


def resolve_ties(tied: Ties, names: Collection[str]) -> dict[str, str]:
    """Tied names as stored in files and documents: chains of ties are resolved to the tensor that has the weights."""
    check_names([*tied, *tied.values()])
    resolved = {}
    for name in tied:
        to, seen = tied[name], {name}
        while to in tied and to not in seen:
            seen.add(to)
            to = tied[to]
        if to in seen:
            raise ValueError(f"{name!r} is tied in a circle, so it has no weights")
        resolved[name] = to
    check_ties(resolved, names)
    if (size := len(json.dumps(resolved))) > MOST_TIED_BYTES:
        raise ValueError(f"{len(tied)} tied names take {size} bytes, but a manifest holds only {MOST_TIED_BYTES}")
    return resolved


@lru_cache(1 << 16)
def plain_name(name: str) -> str:
    """A parameter's name as in the model's own code, without the prefixes of wrappers.

    >>> plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.q.weight")
    'layers.0.q.weight'
    """
    while (shorter := _WRAPPERS.sub("", name)) != name:
        name = shorter
    return name
