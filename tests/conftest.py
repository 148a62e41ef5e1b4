"""Settings of all tests, and fixtures: stores of every kind on real servers, a browser, runs beside SGLang."""

import itertools
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from deltawire.store import Store, open_store
from support.browser import FLAGS, opened
from support.hub_double import hub_double
from support.servers import BUCKET, S3Server, Server, azurite, azurite_missing, seaweedfs

# Kernels ask for this when they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The first call of a kernel compiles it, and these machines are noisy: time says nothing about an example.
settings.register_profile("deltawire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deltawire")

STORES = ["memory", "local", "s3", "azure", "hub"]

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


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store; servers are shared, so each test has its own prefix."""
    kind, prefix = request.param, f"test-{next(_numbers)}"
    if kind == "memory":
        return open_store(f"memory:tests/{prefix}")
    if kind == "local":
        return open_store(tmp_path / prefix)
    server = request.getfixturevalue(f"{kind}_server")
    if kind == "hub":
        config = {"token": server.token, "endpoint": server.endpoint}
        return open_store(f"hf://buckets/owner/{BUCKET}/{prefix}", config=config)
    scheme = {"s3": "s3", "azure": "az"}[kind]
    return open_store(f"{scheme}://{BUCKET}/{prefix}", config=server.config)


@pytest.fixture(scope="module")
def chromium():
    """Debian's, as `make setup` installs it: Playwright's own cannot be had from a package registry.

    Not for the whole session: while it is there, Playwright's event loop runs in this thread, and no other can.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Opens an address, with a width and a theme."""
    return partial(opened, chromium)


@pytest.fixture
def start(tmp_path):
    """Starts a trainer that publishes and a loopback SGLang server; options as those of `sglang_run.Run`."""
    from support.sglang_run import Run

    runs = []

    def make(**options):
        runs.append(Run(tmp_path, **options))
        runs[-1].publish()
        return runs[-1]

    yield make
    for run in runs:
        run.close()
        assert run.server.ended is None
