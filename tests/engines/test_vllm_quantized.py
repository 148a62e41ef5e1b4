"""A vLLM server that quantizes its weights follows a run of bf16: after each update codes and scales are those of a
fresh server, and answers are. On a CPU without AMX vLLM has kernels for `fp8_per_channel` alone, for dense models.
"""

import hashlib

import pytest
import torch

from deltawire.errors import EngineRejected
from support.vllm_reference import fused
from support.vllm_server import Trainer, following, serving

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
FLAGS = ["--quantization", "fp8_per_channel"]
FAULTY = "support.vllm_faults.FaultyExtension"


def sha256(value):
    return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def expected(weights):
    """What vLLM's own functions make of a checkpoint, by its parameter names."""
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    found = {}
    for name, value in fused(weights, 1, 0).items():
        if name.endswith("_proj.weight"):
            scale = _fp8_channel_scale(weight_amax(value, dim=-1, keepdim=True))
            found[name] = sha256(_fp8_quant_per_channel(value, scale).t())
            found[f"{name}_scale"] = sha256(scale)
        else:
            found[name] = sha256(value)
    return {f"dp0:pp0:pcp0:tp0:{name}": value for name, value in found.items()}


def answers(server):
    return [server.complete(prompt)[:2] for prompt in ([1, 2, 3], list(range(40, 60)))]


def plant(weights, number):
    """Maxima that come and go, zeros, subnormals."""
    value = weights["model.layers.1.mlp.down_proj.weight"]
    value[number] = 0
    value[3, number] = (-1) ** number * 3.5
    value[4, :] = 1e-39
    weights["model.layers.0.self_attn.k_proj.weight"][:, number] *= 2


def test_follows_and_serves_what_a_fresh_server_does(tmp_path, vllm_pool):
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store)
    trainer.publish(density=0)
    own = {"arguments": FLAGS, "nursery": vllm_pool.nursery}
    with serving(tmp_path / "base", log=tmp_path / "log", extension=FAULTY, **own) as server:
        assert server.checksums() == expected(trainer.weights)
        seen = set()
        # With a mirror, and without: then the worker decodes against the weights that it keeps.
        for mirror in (None, False):
            with following(store, server, mirror) as replica:
                replica.pull()
                assert server.checksums() == expected(trainer.weights)
                for _ in range(3):
                    plant(trainer.weights, len(seen))
                    version = trainer.publish(density=0.02)
                    replica.pull()
                    assert server.weight_version == str(version)
                    assert server.checksums() == expected(trainer.weights)
                    about = replica.target.about()["engine"]
                    assert about["quantized"] == "fp8_per_channel"
                    seen.add(about["derived"])
                assert about["derived"] == derived(replica)
        assert len(seen) == 6
        with following(store, server) as replica:
            trainer.publish(density=0.9, anchor=True)
            replica.pull()
            assert server.checksums() == expected(trainer.weights)
            kept, version = server.checksums(), server.weight_version
            for name, problem in (("lm_head.weight", None), ("model.layers.0.mlp.up_proj.weight", "infinities")):
                trainer.weights[name][0, 0] = float("inf")
                trainer.publish(density=0)
                if problem is None:
                    replica.pull()
                    kept, version = server.checksums(), server.weight_version
                    continue
                with pytest.raises(EngineRejected, match=problem):
                    replica.pull()
                assert (server.checksums(), server.weight_version) == (kept, version)
            trainer.weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 0.5
            trainer.weights["lm_head.weight"][0, 0] = 0.5
            trainer.publish(density=0.01)
            replica.pull()
            assert server.checksums() == expected(trainer.weights)
            # Someone changes a code: that is seen, and all of it is loaded again.
            ask(server, "spoil_code", "model.layers.1.self_attn.o_proj.weight")
            plant(trainer.weights, 3)
            trainer.publish(density=1)
            replica.pull()
            assert server.checksums() == expected(trainer.weights)
        ours = answers(server)
        with serving(trainer.checkpoint(), extension=None, log=tmp_path / "fresh", **own) as fresh:
            assert server.checksums() == fresh.checksums()
            assert ours == answers(fresh)


@pytest.mark.slow
def test_scales_of_two_workers_are_refused_by_name(tmp_path, vllm_pool):
    trainer = Trainer(tmp_path, f"memory:{tmp_path}")
    trainer.publish(density=0)
    own = {"arguments": FLAGS, "log": tmp_path / "log", "nursery": vllm_pool.nursery, "tp": 2}
    with (
        serving(tmp_path / "base", **own) as server,
        following(f"memory:{tmp_path}", server) as replica,
        pytest.raises(EngineRejected, match="o_proj depend on the weights of several workers"),
    ):
        replica.pull()


def ask(server, method, *arguments):
    server.client.post("/collective_rpc", json={"method": method, "args": arguments}).raise_for_status()


def derived(replica):
    """The digest of codes and scales, computed from all of them."""
    engine = replica.target.engine
    engine.digest()
    return engine.status().derived
