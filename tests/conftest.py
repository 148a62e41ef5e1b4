"""Settings of all tests, and fixtures: stores of every kind on real servers, a browser, runs beside SGLang."""

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from deltawire import Publisher
from deltawire.kernels.cpu.warmup import warm_up
from deltawire.run.run import Run
from deltawire.store import Store, open_store
from support import trl_layout
from support.browser import FLAGS, opened
from support.command_line import save_steps, told
from support.hub_double import hub_double
from support.servers import BUCKET, S3Server, Server, azurite, azurite_missing, seaweedfs
from support.web_servers import NGINX, Nginx, Served, file_server

# Kernels ask for this when they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime.interpreter import GridExecutor

    # The interpreter replaces parts of Triton while a kernel runs: not for two threads at once.
    launch, alone = GridExecutor.__call__, threading.RLock()

    def launch_alone(self: GridExecutor, *args: Any, **named: Any) -> None:
        with alone:
            launch(self, *args, **named)

    GridExecutor.__call__ = launch_alone

# A shell that runs the tests in the background leaves Ctrl-C to nobody, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors are small, and threads that wait for each other spin: with another worker on the cores, many times as long.
torch.set_num_threads(1)

# The first call of a kernel compiles it, and these machines are noisy: time says nothing about an example.
settings.register_profile("test", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("test"), max_examples=500)
settings.register_profile("soak", settings.get_profile("test"), max_examples=2000)
# For `make mutants`: a failure is enough, nobody reads it.
settings.register_profile(
    "mutants", settings.get_profile("test"), max_examples=30, phases=[Phase.explicit, Phase.generate], derandomize=True
)
settings.load_profile("test")

STORES = [
    "memory", "local", *(pytest.param(kind, marks=pytest.mark.process) for kind in ("s3", "azure", "hub")),
]  # fmt: skip
# Whoever asks for one of these talks to another process, or to a server over loopback.
PROCESSES = {"s3_server", "azure_server", "hub_server", "web_server", "hub", "start", "chromium", "vllm_pool"}

_numbers = itertools.count()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Kernels are compiled once, here, and kept on disk; workers start after this and load them."""
    if session.config.getoption("numprocesses", None):
        warm_up()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has all tests of a file, one all of vLLM, one all pages; the groups that take longest come first."""
    for item in items:
        if PROCESSES & set(item.fixturenames) or item.get_closest_marker("vllm"):
            item.add_marker("process")
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    with_processes = {group_of(item) for item in items if item.get_closest_marker("process")}

    def place(item: pytest.Item) -> tuple[bool, ...]:
        group = group_of(item)
        return group != "vllm", group != "browser", group not in with_processes

    items.sort(key=place)


def group_of(item: pytest.Item) -> str:
    if item.get_closest_marker("vllm"):
        return "vllm"
    return "browser" if "chromium" in item.fixturenames else item.path.stem


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


@pytest.fixture(scope="session")
def web_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    if NGINX is None:
        pytest.skip("no nginx on this machine: apt-get install nginx")
    with file_server(tmp_path_factory.mktemp("web")) as server:
        yield server


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store; servers are shared, so each test has its own prefix. A test of reading may ask for `web`, too."""
    kind, prefix = request.param, f"test-{next(_numbers)}"
    if kind == "memory":
        return open_store(f"memory:tests/{prefix}")
    if kind == "local":
        return open_store(tmp_path / prefix)
    server = request.getfixturevalue(f"{kind}_server")
    if kind == "web":
        return Served(open_store(server.folder / "root" / prefix), open_store(f"{server.url}/{prefix}"))
    if kind == "hub":
        config = {"token": server.token, "endpoint": server.endpoint}
        return open_store(f"hf://buckets/owner/{BUCKET}/{prefix}", config=config)
    scheme = {"s3": "s3", "azure": "az"}[kind]
    return open_store(f"{scheme}://{BUCKET}/{prefix}", config=server.config)


@pytest.fixture(scope="session")
def steps(tmp_path_factory):
    """Checkpoints of one training run: step-0, step-1, ..."""
    folder = tmp_path_factory.mktemp("steps")
    save_steps(folder)
    return folder


@pytest.fixture(scope="session")
def published(tmp_path_factory, steps):
    url = tmp_path_factory.mktemp("published") / "run"
    for number in range(6):
        base = ["--base", steps / f"step-{number - 1}"] if number else ["--run", "demo"]
        told("publish", steps / f"step-{number}", "--to", url, "--step", 10 * number, *base)
    return url


@pytest.fixture
def store(tmp_path, published):
    """A run with versions 0 to 5, published by the command; each test has its own copy, as old as the test."""
    return shutil.copytree(published, tmp_path / "run", copy_function=shutil.copy)


@pytest.fixture(scope="session")
def vllm_pool(tmp_path_factory):
    from support.vllm_pool import Pool

    pool = Pool(tmp_path_factory.mktemp("vllm"))
    yield pool
    pool.close()


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


@pytest.fixture(params=["0.5.17", "0.5.23"])
def start(request, tmp_path):
    """Starts a trainer that publishes and a loopback SGLang server; options as those of `sglang_run.Run`."""
    from support.sglang_run import Run

    runs = []

    def make(**options):
        # The old one cannot empty a cache of prefixes while requests run.
        runs.append(Run(tmp_path, **{"release": request.param, "keeps_prefixes": request.param != "0.5.17"} | options))
        runs[-1].publish()
        return runs[-1]

    yield make
    for run in runs:
        run.close()
        assert run.server.ended is None


@pytest.fixture
def trl_run(tmp_path):
    """A run of six versions, the last but one without a change, and what its weights were."""
    weights, history = trl_layout.model(), []
    with Publisher(tmp_path / "run", weights, anchors=3) as publisher:
        for version in range(6):
            if version not in (0, 4):
                trl_layout.train(weights, version)
            publisher.publish(anchor=version == 5)
            history.append(trl_layout.bits(weights))
        publisher.flush()
    return Run(tmp_path / "run"), history
