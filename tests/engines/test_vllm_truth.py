"""What a vLLM server computes with is what it says: nothing of it is left as it was, and no copy stays behind."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace

import httpx
import pytest
import torch

from deltawire.engines.prove import ALIVE, DEAD, UNTOLD, prove
from deltawire.engines.token import engine_token
from deltawire.engines.vllm.probe import VllmProbe
from deltawire.errors import EngineBroken, EngineRejected
from support.command_line import run, told
from support.servers import free_ports
from support.vllm_models import ARCHITECTURES
from support.vllm_server import FAULTY, PROMPTS, Trainer, Vllm, following, serving

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
FIRST = "support.vllm_faults.FirstEngine"
ALONE = {"enable_eplb": False, "data_parallel_size": 1}
ALONE |= {"data_parallel_external_lb": False, "data_parallel_hybrid_lb": False}


@pytest.fixture
def fault():
    """What is taken out of deltawire: nothing."""
    return ()


def answers(server):
    return [server.complete(prompt)[:2] for prompt in PROMPTS]


def proven(server):
    probe = VllmProbe(server.url)
    try:
        return prove(probe)
    finally:
        probe.close()


def ask(server, method, *arguments):
    server.client.post("/collective_rpc", json={"method": method, "args": arguments}).raise_for_status()


def held(server):
    """What the processes of a server that answer requests say: each connection is to one of them."""
    options = {"headers": {"Authorization": f"Bearer {engine_token()}"}, "timeout": 60, "trust_env": False}
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.url, **options)) for _ in range(32)]
        return {client.post("/deltawire/status").raise_for_status().json()["held"] for client in clients}


def test_a_run_that_lacks_what_the_server_has_is_refused(tmp_path, vllm_pool, fault):
    """With dummy weights in it the server would tell a version, and serve something else."""
    own = {"arguments": ["--load-format", "dummy"], "log": tmp_path / "log", "nursery": vllm_pool.nursery}
    trainer = Trainer(tmp_path / "whole", f"memory:{tmp_path}")
    trainer.publish(density=0)
    with serving(tmp_path / "whole/base", extension=FAULTY, **own) as server:
        if fault:
            ask(server, *fault)
        for missing, parameter in (
            ("lm_head.weight", "lm_head.weight"),
            ("model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"),
            ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ):
            store = f"memory:{tmp_path}-{missing}"
            Trainer(tmp_path / missing, store, without=[missing]).publish(density=0)
            with following(store, server) as replica:
                with pytest.raises(EngineRejected, match=f"elements of {parameter}") as caught:
                    replica.pull()
                assert caught.value.tensor == parameter
                assert replica.version is None
        assert server.weight_version == "default"
        with following(f"memory:{tmp_path}", server) as replica:
            replica.pull()
        assert server.checksums() == trainer.expected[0]


def follow_and_compare(trainer, store, server, folder, **own):
    """Deltas, a reload, deltas again: parameters and answers are those of a fresh server, with every version."""
    # What a server copies when it is first asked is copied now.
    first = answers(server)
    trainer.publish(density=0)
    with following(store, server) as replica:
        replica.pull()
        assert answers(server) == first
        for number, (density, anchor) in enumerate([(0.02, False), (0.9, True), (0.02, False)], 1):
            trainer.publish(density=density, anchor=anchor)
            replica.pull()
            assert server.weight_version == str(number)
            if number != 2:
                with serving(trainer.checkpoint(), extension=None, log=folder / "fresh", **own) as fresh:
                    assert server.checksums() == fresh.checksums()
                    assert answers(server) == answers(fresh), f"version {number}"
        assert answers(server) != first
        about = replica.target.about()["engine"]
    before, asked = server.checksums(), answers(server)
    proof = proven(server)
    assert [each for each in proof.found if DEAD in (each.prefill, each.decode)] == []
    assert (server.checksums(), answers(server)) == (before, asked)
    return about, proof


def compare(kind, tmp_path, vllm_pool, dtype="bfloat16", fault=()):
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, kind=kind, dtype=getattr(torch, dtype))
    # Latent attention that needs no AMX, which some CPUs have.
    attention = ["--attention-backend", "CPU_MLA"] if kind.startswith("deepseek") else []
    own = {"nursery": vllm_pool.nursery, "arguments": ["--dtype", dtype, *attention]}
    with serving(tmp_path / "base", log=tmp_path / "log", extension=FAULTY, **own) as server:
        if fault:
            ask(server, *fault)
        return follow_and_compare(trainer, store, server, tmp_path, **own)


def test_sinks_that_are_copied_at_the_first_request(tmp_path, vllm_pool, fault):
    """fp16 sinks on a CPU: vLLM computes from an fp32 copy of them."""
    _, proof = compare("gpt_oss", tmp_path, vllm_pool, dtype="float16", fault=fault)
    assert {(each.prefill, each.decode) for each in proof.found if each.name.endswith("sinks")} == {(ALIVE, ALIVE)}


@pytest.mark.parametrize("kind", [
    "deepseek_v3",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES if kind != "deepseek_v3"),
])  # fmt: skip
def test_architectures(kind, tmp_path, vllm_pool):
    about, proof = compare(kind, tmp_path, vllm_pool)
    # The layer that predicts further tokens is in the checkpoint, and not in the server.
    assert bool(about.get("left_out")) == (kind == "deepseek_v3")
    assert sum(UNTOLD in (each.prefill, each.decode) for each in proof.found) <= len(proof.found) // 10


@pytest.mark.slow
def test_absorbed_copies_are_made_again(tmp_path, vllm_pool):
    """Latent attention that computes from copies of `kv_b_proj`: checksums of those are a fresh server's, too."""
    _, proof = compare("deepseek_v2", tmp_path, vllm_pool, fault=["absorb"])
    names = [each.name for each in proof.found]
    assert any(name.endswith("kv_b_proj.weight") for name in names)
    assert not any(name.endswith(("W_UV", "W_UK_T")) for name in names)


def latent(weight):
    """Attention of which vLLM's own code has made copies, since it computes in another dtype than `kv_b_proj` has."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Latent(torch.nn.Module):
        process_weights_after_loading = MLAAttention.process_weights_after_loading

    module = Latent()
    module.kv_b_proj = torch.nn.Linear(16, 2 * (4 + 8), bias=False)
    module.kv_b_proj.requires_grad_(False).weight.copy_(weight)
    module.kv_b_proj.quant_method = UnquantizedLinearMethod()
    for name in ("is_amx_bmm_enabled", "dcp_q_replicate", "is_aiter_triton_fp4_bmm_enabled",
                 "is_aiter_triton_fp8_bmm_enabled"):  # fmt: skip
        setattr(module, name, False)
    module.impl = SimpleNamespace(process_weights_after_loading=lambda dtype: None)
    module.kv_lora_rank, module.num_heads, module.qk_nope_head_dim, module.v_head_dim = 16, 2, 4, 8
    module.quant_config = None
    set_default_quant_scales(module, register_buffer=True)
    module.process_weights_after_loading(torch.bfloat16)
    return module


def test_absorbed_copies_follow_what_they_are_made_of():
    from deltawire.engines.vllm.copies import Copies, absorbed

    model, weight = torch.nn.Module(), torch.randn(24, 16)
    model.add_module("attention", latent(weight))
    assert absorbed(model) == {"attention.W_UV", "attention.W_UK_T"}
    copies = Copies(model, torch.bfloat16)
    assert copies.holds()
    own = [getattr(model.attention, name) for name in ("W_UV", "W_UK_T")]
    places, before = [each.data_ptr() for each in own], [each.clone() for each in own]
    model.attention.kv_b_proj.weight[3] += 1
    assert not Copies(model, torch.bfloat16).holds()
    # Looked at while it serves, they stay as they are.
    assert all(map(torch.equal, own, before))
    model.attention.kv_b_proj.weight[20] += 1
    copies.refresh(())
    fresh = latent(model.attention.kv_b_proj.weight)
    for name, place in zip(("W_UV", "W_UK_T"), places, strict=True):
        found = getattr(model.attention, name)
        assert torch.equal(found, getattr(fresh, name))
        assert found.data_ptr() == place


@pytest.mark.parametrize(("attribute", "advice"), [
    ("is_amx_bmm_enabled", "layout: start the server with --attention-backend CPU_MLA$"), ("dcp_q_replicate", "layout$")
])  # fmt: skip
def test_absorbed_copies_in_another_order_are_refused_by_name(attribute, advice):
    from deltawire.engines.vllm.copies import check

    model = torch.nn.Module()
    model.add_module("attention", torch.nn.Module())
    setattr(model.attention, attribute, True)
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None), parallel_config=SimpleNamespace(**ALONE))
    with pytest.raises(
        EngineRejected, match=f"attention computes from copies of kv_b_proj with another {advice}"
    ) as caught:
        check(model, config)
    assert caught.value.tensor == "attention"


@pytest.mark.parametrize(("of_model", "of_ranks", "advice"), [
    ({"enable_sleep_mode": True}, {}, "start it without --enable-sleep-mode"),
    ({"enable_sleep_mode": False}, {"enable_eplb": True}, "start it without --enable-eplb"),
    ({}, {"data_parallel_size": 2, "data_parallel_external_lb": True}, "start one server for all"),
    ({}, {"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "start one server for all"),
])  # fmt: skip
def test_a_server_that_moves_drops_or_shares_weights_is_refused(of_model, of_ranks, advice):
    from deltawire.engines.vllm.copies import check

    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, **of_model),
        parallel_config=SimpleNamespace(**{**ALONE, **of_ranks}),
    )
    with pytest.raises(EngineRejected, match=advice):
        check(torch.nn.Module(), config)


def test_a_planted_copy_is_found(tmp_path, vllm_pool, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = f"memory:{tmp_path}"
    Trainer(tmp_path, store).publish(density=0)
    name = "model.layers.1.mlp.down_proj"
    with vllm_pool.server(extension=FAULTY) as server:
        command = ("prove", "--engine", "vllm", "--url", server.url)
        found = told(*command)
        assert found["holds"]
        assert {each["name"] for each in found["found"]} >= {f"{name}.weight", "lm_head.weight", "model.norm.weight"}
        assert {each["decode"] for each in found["found"]} == {ALIVE}
        ask(server, "plant", name)
        # What was proven is remembered.
        assert told(*command) == found
        again = run(*command, "--again")
        assert again.exit_code == 3
        dead = [line.split()[1:] for line in again.stdout.splitlines()[1:] if DEAD in line.split()]
        assert dead == [[f"{name}.weight", "-", DEAD, DEAD]]
        with (
            following(store, server) as replica,
            pytest.raises(EngineRejected, match=f"has a copy of {re.escape(name)}.weight"),
        ):
            replica.pull()
        # Nobody can take it out again.
        server.kill()


def test_one_of_two_data_parallel_engines_fails(tmp_path, vllm_pool, fault):
    """Each engine answers for itself: the failure is told in the same update, and the next one heals it."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store)
    trainer.publish(density=0)
    own = {
        "arguments": ["--data-parallel-size", "2", *fault], "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        "extension": FAULTY, "log": tmp_path / "log", "nursery": vllm_pool.nursery,
    }  # fmt: skip
    with serving(tmp_path / "base", **own) as server, following(store, server) as replica:
        replica.pull()
        engine = replica.target.engine
        for failure, message in (({"stages": 1}, "no room to stage it"), ({"writes": 2}, "rolled back")):
            version = trainer.publish()
            ask(server, "fail", {"rank": 1, **failure})
            with pytest.raises(EngineRejected, match=message):
                replica.pull()
            assert [each.version for each in engine.status().states] == [version - 1] * 2
            assert server.weight_version == str(version - 1)
            replica.pull()
            assert [each.version for each in engine.status().states] == [version] * 2
            assert engine.digest() == replica.target.mirror.state().digest
            expected = trainer.expected[version]
            others = {name.replace("dp0:", "dp1:"): each for name, each in expected.items()}
            assert server.checksums() == {**expected, **others}
        version = trainer.publish()
        ask(server, "fail", {"rank": 1, "writes": 2, "undos": 2})
        with pytest.raises(EngineBroken):
            replica.pull()
        assert held(server) == {True}
        replica.pull()
        assert held(server) == {False}
        assert replica.version == version
        assert not server.client.get("/is_paused").json()["is_paused"]
        ask(server, "mumble")
        with pytest.raises(EngineRejected, match="rank 0: TypeError: Object of type set is not JSON"):
            engine.digest()
        assert all(server.complete([number, 2, 3])[2] == "length" for number in range(1, 5))


@pytest.mark.slow
def test_servers_that_have_some_of_the_data_parallel_engines_each(tmp_path, vllm_pool):
    """A load balancer is in front of two servers, which an agent each drives."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store)
    trainer.publish(density=0)
    (port,) = free_ports(1)

    def start(rank):
        ranks = {"size": 4, "size-local": 2, "start-rank": rank, "address": "127.0.0.1", "rpc-port": port}
        arguments = [f"--data-parallel-{name}={value}" for name, value in ranks.items()]
        own = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "nursery": vllm_pool.nursery}
        return Vllm(tmp_path / "base", arguments=arguments, log=tmp_path / f"log-{rank}", **own)

    with closing(start(0)) as first, closing(start(2)) as second:
        for server in (first.wait(), second.wait()):
            with following(store, server) as replica:
                replica.pull()
                version = trainer.publish()
                replica.pull()
                assert [each.version for each in replica.target.engine.status().states] == [version] * 2
                assert set(server.checksums().values()) == set(trainer.expected[version].values())


def test_each_token_is_named_after_the_weights_that_it_was_computed_with(tmp_path, vllm_pool):
    """In the middle of a request that goes on as it is: each version has a token of its own, whatever came before."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store)
    for name, value in trainer.weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            value.zero_()
    trainer.weights["model.embed_tokens.weight"][:, 0] = 1
    trainer.weights["model.norm.weight"].fill_(1)
    first, body = trainer.weights["lm_head.weight"][:, 0], {"max_tokens": 240, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": body}

    def publish(version):
        first.zero_()[10 + version] = 1
        assert trainer.publisher.publish().wait().version == version

    own = {"arguments": ["--enable-scale-out"], "log": tmp_path / "log", "nursery": vllm_pool.nursery}
    publish(0)
    with (
        serving(tmp_path / "base", **own) as server,
        following(store, server, running_requests="keep") as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        replica.pull()
        found = set()
        for version in range(1, 40):
            publish(version)
            asked = pool.submit(server.client.post, "/inference/v1/generate", json=body)
            # When it has begun.
            time.sleep(0.05 + 0.01 * (version % 10))
            replica.pull()
            (choice,) = asked.result().raise_for_status().json()["choices"]
            for span in choice["weight_versions"]:
                assert set(choice["token_ids"][span["start"] : span["end"]]) == {10 + int(span["version"])}
            found.add(len(choice["weight_versions"]))
            if found >= {2} and version > 3:
                break
        assert 2 in found


@pytest.mark.slow
@pytest.mark.parametrize(("check", "fault", "message"), [
    (test_a_run_that_lacks_what_the_server_has_is_refused, ["forget_coverage"], "DID NOT RAISE"),
    (test_sinks_that_are_copied_at_the_first_request, ["forget_sinks"], r"^version \d\n"),
    (test_one_of_two_data_parallel_engines_fails, ["--middleware", FIRST], "DID NOT RAISE"),
], ids=["coverage", "sinks", "data parallel"])  # fmt: skip
def test_a_server_without_it_is_found_out(tmp_path, vllm_pool, check, fault, message):
    """What these three tests are about is taken out of deltawire, and they fail."""
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        check(tmp_path, vllm_pool, fault)
