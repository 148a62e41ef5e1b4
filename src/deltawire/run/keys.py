"""The keys of a run's objects, built and parsed.

    run.json                                              the run's id
    manifests/00000042.json                               version 42: it exists if this does
    manifests/00000042.from-00000038.json                 an additional hop to it: a delta over several versions
    manifests/00000042.anchor.json                        an additional hop to it: all weights
    deltas/00000042-from-00000041-UPLOAD.safetensors      a delta, or -00001-of-00003 and so on for its parts
    anchors/00000042-UPLOAD/FILE                          the files of an anchor
    replicas/NAME.json                                    the last heartbeat of a replica
    lease.json                                            who may write, on stores without conditional writes
    latest.json                                           a version that existed lately, for readers that cannot list

Any other key does not belong to the run and is ignored.
"""

import re

from deltawire.format.checkpoint import STATE_NAME

MOST_VERSION = 99_999_999

RUN_KEY, LEASE_KEY, LATEST_KEY = "run.json", "lease.json", "latest.json"
MANIFESTS, DELTAS, ANCHORS, REPLICAS = "manifests/", "deltas/", "anchors/", "replicas/"

# Digits are [0-9] throughout: `\d` and int() accept those of every script.
_FILE_NAME = r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,254}"
_FILE = re.compile(_FILE_NAME)
_DOCUMENT = re.compile(r"manifests/([0-9]{8})(\.anchor|\.from-([0-9]{8}))?\.json")
_DELTA = re.compile(r"deltas/([0-9]{8})-from-([0-9]{8})-([0-9a-f]{1,64})(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_ANCHOR = re.compile(rf"anchors/([0-9]{{8}})-([0-9a-f]{{1,64}})/{_FILE_NAME}")
_REPLICA = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")


def manifest_key(version: int) -> str:
    return f"{MANIFESTS}{version:08}.json"


def hop_key(version: int, base: int | None) -> str:
    return f"{MANIFESTS}{version:08}.{'anchor' if base is None else f'from-{base:08}'}.json"


def replica_key(name: str) -> str:
    if not _REPLICA.fullmatch(name):
        raise ValueError(f"a replica's name has up to 200 letters, digits, '_', '.' and '-', unlike {name[:220]!r}")
    return f"{REPLICAS}{name}.json"


def read_document_key(key: str) -> tuple[int, int | None, bool] | None:
    """Parse a key under manifests/: version, base, and whether it is the version's own manifest."""
    named = _DOCUMENT.fullmatch(key)
    if not named:
        return None
    return int(named[1]), None if named[3] is None else int(named[3]), named[2] is None


def read_object_key(key: str) -> tuple[int, int | None, str] | None:
    """Parse a key under deltas/ or anchors/: version, base, and which upload it belongs to."""
    if named := _DELTA.fullmatch(key):
        return int(named[1]), int(named[2]), named[3]
    if named := _ANCHOR.fullmatch(key):
        return int(named[1]), None, named[2]
    return None


def read_replica_key(key: str) -> str | None:
    """Parse a key under replicas/: the name of the replica."""
    name = key.removeprefix(REPLICAS).removesuffix(".json")
    return name if key == f"{REPLICAS}{name}.json" and _REPLICA.fullmatch(name) else None


def is_file_name(text: str) -> bool:
    """Whether a file of an anchor or a part of a delta may have this name, which is also used on disk."""
    return _FILE.fullmatch(text) is not None and text != STATE_NAME


def check_version(version: int) -> int:
    """Return the version, or raise ValueError if it does not fit into a key."""
    if not 0 <= version <= MOST_VERSION:
        raise ValueError(f"version {version} cannot be written: versions go from 0 to {MOST_VERSION}; start a new run")
    return version
