"""Which vLLM is taken, tried with a warning, or refused. `make test-vllm-versions` runs servers of each."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from deltawire.engines.token import engine_token
from deltawire.engines.vllm.route import Route
from deltawire.engines.vllm.versions import is_too_old, missing


@pytest.mark.parametrize(
    ("version", "refused", "said"),
    [
        ("0.28.1", True, "vLLM 0.28.1 is too old: deltawire needs vLLM 0.29 or later"),
        ("0.29.0", False, None),
        ("0.32.4+cpu", False, None),
        ("0.33.0rc1", False, "vLLM 0.33.0rc1 is untested"),
        ("1.0.0", False, "vLLM 1.0.0 is untested"),
        ("0.1.dev1+g0123abc", False, "is untested"),
    ],
)
def test_versions(version, refused, said, caplog):
    assert is_too_old(version) == refused
    assert (said in caplog.text) if said else not caplog.text


def test_an_old_vllm_serves_without_the_backend(monkeypatch, caplog):
    """Others may use it in the same environment."""
    vllm = pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from deltawire.engines.vllm.plugin import register

    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    with monkeypatch.context() as older:
        older.setattr(vllm, "__version__", "0.28.0")
        register()
    assert "too old" in caplog.text
    assert not WeightTransferEngineFactory._registry
    register()
    assert list(WeightTransferEngineFactory._registry) == ["deltawire"]


async def _nothing(*_, **__): ...


def _client():
    core = dict.fromkeys(("call_utility_async", "pause_scheduler_async", "resume_scheduler_async"), _nothing)
    return SimpleNamespace(
        get_weight_version=_nothing, update_weight_version=_nothing, engine_core=SimpleNamespace(**core),
        renderer=SimpleNamespace(clear_mm_cache_async=_nothing),
    )  # fmt: skip


def test_a_vllm_with_another_interface_is_refused_by_name():
    client = _client()
    assert missing(client) is None
    del client.engine_core.pause_scheduler_async

    async def ask():
        app = Starlette(middleware=[Middleware(Route)])
        app.state.engine_client = client
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as server:
            headers = {"Authorization": f"Bearer {engine_token()}"}
            return await server.post("/deltawire/status", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == 400
    assert "no engine_core.pause_scheduler_async: deltawire needs vLLM 0.29" in answer.json()["error"]
