"""Stores of every kind as fixtures, on real servers that run for the whole session."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire.store import Store, open_store
from hub_double import hub_double
from servers import BUCKET, S3Server, Server, azurite, azurite_missing, seaweedfs

KINDS = ["memory", "local", "s3", "azure", "hub"]

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with seaweedfs() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Server]:
    if reason := azurite_missing():
        pytest.skip(f"no Azure server: {reason}")
    with azurite() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def hub_server() -> Iterator[object]:
    with hub_double() as server:
        server.create_bucket(f"owner/{BUCKET}")
        yield server


@pytest.fixture(params=KINDS)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store; servers are shared, so each test has its own prefix."""
    return fresh_store(request.param, request, tmp_path)


def fresh_store(kind: str, request: pytest.FixtureRequest, folder: Path) -> Store:
    prefix = f"test-{next(_numbers)}"
    if kind == "memory":
        return open_store(f"memory:tests/{prefix}")
    if kind == "local":
        return open_store(folder / prefix)
    if kind == "hub":
        server = request.getfixturevalue("hub_server")
        config = {"token": server.token, "endpoint": server.endpoint}
        return open_store(f"hf://buckets/owner/{BUCKET}/{prefix}", config=config)
    server = request.getfixturevalue(f"{kind}_server")
    scheme = {"s3": "s3", "azure": "az"}[kind]
    return open_store(f"{scheme}://{BUCKET}/{prefix}", config=server.config)
