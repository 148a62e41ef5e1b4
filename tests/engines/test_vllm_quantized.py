"""A vLLM server that quantizes its weights follows a run of bf16: after each update codes and scales are those of a
fresh server, and answers are. On a CPU without AMX vLLM has kernels for `fp8_per_channel` alone, for dense models.
"""

import hashlib
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltawire import Publisher, Replica
from deltawire.engines.quantized.derive import QuantizedModel
from deltawire.engines.target import EngineTarget
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.engines.vllm.quantized import as_loaded
from deltawire.errors import EngineRejected
from support.command_line import run, told
from support.vllm_reference import checksums, fused
from support.vllm_server import FAULTY, Trainer, following, make_model, save_model, serving

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
FLAGS = ["--quantization", "fp8_per_channel"]


def sha256(value):
    return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def expected(weights, tp=1):
    """What vLLM's own functions make of a checkpoint, by its parameter names, on each rank."""
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    found = {}
    ranks = [fused(weights, tp, rank) for rank in range(tp)]
    for name in ranks[0]:
        parts = [each[name] for each in ranks]
        maxima = [weight_amax(each, dim=-1, keepdim=True) for each in parts] if name.endswith("_proj.weight") else []
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # Their rows are divided.
            maxima = [torch.stack(maxima).amax(0)] * tp
        for rank, part in enumerate(parts):
            key = f"dp0:pp0:pcp0:tp{rank}:{name}"
            found[key] = sha256(part)
            if maxima:
                scale = _fp8_channel_scale(maxima[rank])
                found[key], found[f"{key}_scale"] = sha256(_fp8_quant_per_channel(part, scale).t()), sha256(scale)
    return found


def answers(server):
    return [server.complete(prompt)[:2] for prompt in ([1, 2, 3], list(range(40, 60)))]


def plant(weights, number):
    """Maxima that come and go, zeros, subnormals."""
    value = weights["model.layers.1.mlp.down_proj.weight"]
    value[number] = 0
    value[3, number] = (-1) ** number * 3.5
    value[4, :] = 1e-39
    weights["model.layers.0.self_attn.k_proj.weight"][:, number] *= 2


def test_a_model_serves_while_its_second_self_is_loaded_into():
    """Where its weights go is found by loading into parameters that it does not compute with."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    method = type("Fp8PtpcOnlineLinearMethod", (), {})()
    method.fp8_linear = type("CutlassFP8ScaledMMLinearKernel", (), {})()
    plain, layer = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(4, 2, bias=False)
    layer.quant_method = method
    layer.weight_scale = torch.nn.Parameter(torch.ones(2))
    get_layerwise_info(layer).restore_metadata[0]["weight"] = torch.empty(2, 4, dtype=torch.bfloat16, device="meta")
    model, original = torch.nn.Sequential(layer, plain, layer), torch.zeros(2, 4, dtype=torch.bfloat16)
    quantized = QuantizedModel([])
    quantized.tensors["0.weight"] = SimpleNamespace(original=original)
    before = dict(model.named_parameters())

    twin = as_loaded(model, quantized)
    with torch.no_grad():
        twin[0].weight.fill_(7)

    assert (original == 7).all()
    assert twin[0] is twin[2]
    assert {name for name, _ in twin.named_parameters()} == {"0.weight", "1.weight"}
    assert twin[1].weight is plain.weight
    now = dict(model.named_parameters())
    assert now.keys() == before.keys() == {"0.weight", "0.weight_scale", "1.weight"}
    assert all(now[name] is before[name] for name in before)


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
                # It was started with these weights, or an agent before this one has written them.
                assert not replica.target.pause_seconds
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
                # Also where all weights would be loaded, as after training has diverged.
                trainer.publish(density=0.9, anchor=True)
                with pytest.raises(EngineRejected, match=problem):
                    replica.pull()
                assert (server.checksums(), server.weight_version) == (kept, version)
                assert not server.client.get("/is_paused").json()["is_paused"]
                assert replica.version == int(version)
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
@pytest.mark.parametrize("mirror", [None, False])
def test_two_workers_follow_with_scales_that_they_share(mirror, tmp_path, vllm_pool):
    """Rows of `o_proj` and `down_proj` are divided between them."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, encoding="auto" if mirror is None else "mirrorless")
    trainer.publish(density=0)
    own = {"arguments": FLAGS, "nursery": vllm_pool.nursery, "tp": 2}
    with serving(tmp_path / "base", log=tmp_path / "log", extension=FAULTY, **own) as server:
        assert server.checksums() == expected(trainer.weights, 2)
        with following(store, server, mirror) as replica:
            replica.pull()
            assert replica.target.pause_seconds == 0
            assert server.checksums() == expected(trainer.weights, 2)
            for number in range(4):
                plant(trainer.weights, number)
                down = trainer.weights["model.layers.0.mlp.down_proj.weight"]
                # A largest element in the part of one worker, then of the other.
                down[2] = down[2].clamp(-0.1, 0.1)
                down[2, number % 2 * (down.shape[1] - 1)] = 1.5
                version = trainer.publish(density=0.02)
                replica.pull()
                assert server.weight_version == str(version)
                assert server.checksums() == expected(trainer.weights, 2)
            about = replica.target.about()["engine"]
            assert (about["quantized"], about["derived"]) == ("fp8_per_channel", derived(replica))
            # One worker cannot write: both go on with the version before.
            kept = server.checksums()
            plant(trainer.weights, 5)
            ask(server, "fail", {"rank": 1, "writes": 2})
            trainer.publish(density=0.02)
            with pytest.raises(EngineRejected, match="rolled back"):
                replica.pull()
            assert (server.checksums(), server.weight_version) == (kept, str(version))
            version = replica.pull().version
            kept = server.checksums()
            assert kept == expected(trainer.weights, 2)
            # One has an infinity, and the other does not wait for it.
            trainer.weights["model.layers.0.mlp.down_proj.weight"][0, -1] = torch.inf
            trainer.publish(density=0)
            with pytest.raises(EngineRejected, match="infinities"):
                replica.pull()
            assert (server.checksums(), server.weight_version) == (kept, str(version))
            trainer.weights["model.layers.0.mlp.down_proj.weight"][0, -1] = 0.5
            # Without a mirror each delta is written as it is, so that the way leads through the version before.
            trainer.publish(density=0.02, anchor=mirror is False)
            replica.pull()
            assert server.checksums() == expected(trainer.weights, 2)
        ours = answers(server)
        with serving(trainer.checkpoint(), extension=None, log=tmp_path / "fresh", **own) as fresh:
            assert server.checksums() == fresh.checksums()
            assert ours == answers(fresh)


def test_a_fleet_of_bf16_fp8_and_files(tmp_path, vllm_pool):
    """One run, three kinds of replicas; `deltawire status` tells what each serves."""
    store = tmp_path / "run"
    trainer = Trainer(tmp_path, store)
    trainer.publish(density=0)
    own = {"nursery": vllm_pool.nursery}
    with ExitStack() as stack:
        plain = stack.enter_context(serving(tmp_path / "base", log=tmp_path / "bf16", **own))
        eight = stack.enter_context(serving(tmp_path / "base", log=tmp_path / "fp8", arguments=FLAGS, **own))
        targets = {
            "bf16": EngineTarget(VllmEngine(plain.url)), "fp8": EngineTarget(VllmEngine(eight.url)),
            "files": tmp_path / "mirror",
        }  # fmt: skip
        replicas = {name: stack.enter_context(Replica(store, target, name=name)) for name, target in targets.items()}
        seen = set()
        for number in range(4):
            if number:
                plant(trainer.weights, number)
                trainer.publish(density=0.02)
            for each in replicas.values():
                each.pull()
            assert plain.checksums() == checksums(trainer.weights)
            assert eight.checksums() == expected(trainer.weights)
            found = load_file(tmp_path / "mirror/model.safetensors")
            assert {name: sha256(value) for name, value in found.items()} == {
                name: sha256(value) for name, value in trainer.weights.items()
            }
            rows = {row["name"]: row for row in told("status", store)["replicas"]}
            assert {name: (row["engine"], row["version"], row["health"]) for name, row in rows.items()} == {
                "bf16": ("vllm", number, "ok"), "fp8": ("vllm fp8_per_channel", number, "ok"),
                "files": (None, number, "ok"),
            }  # fmt: skip
            assert rows["bf16"]["derived"] is rows["files"]["derived"] is None
            assert rows["fp8"]["derived"] == derived(replicas["fp8"])
            seen.add(rows["fp8"]["derived"])
        assert len(seen) == 4
        lines = run("status", store).stdout.splitlines()
        assert any(f"vllm fp8_per_channel {rows['fp8']['derived'][:8]}" in line for line in lines)


STORED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip


def stored(weights):
    """A checkpoint of codes and scales, as the trainer makes them."""
    found = {}
    for name, value in weights.items():
        found[name] = value
        if name.endswith("_proj.weight"):
            scale = value.float().abs().amax(1, keepdim=True).clamp(1e-6) / 448
            found[name], found[f"{name}_scale"] = (value.float() / scale).to(torch.float8_e4m3fn), scale
    return found


def served(weights):
    """The same as vLLM fuses and calls it; it computes from transposed codes."""
    codes = {name: value for name, value in stored(weights).items() if not name.endswith("_scale")}
    scales = {name.removesuffix("_scale"): value for name, value in stored(weights).items() if name.endswith("_scale")}
    found = {}
    for name, value in fused(codes, 1, 0).items():
        found[name] = sha256(value.t() if name.endswith("_proj.weight") else value)
    for name, value in fused({**codes, **scales}, 1, 0).items():
        if name.endswith("_proj.weight"):
            found[f"{name}_scale"] = sha256(value)
    return {f"dp0:pp0:pcp0:tp0:{name}": value for name, value in found.items()}


def save_stored(weights, folder):
    save_file({name: value.contiguous() for name, value in stored(weights).items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "quantization_config": STORED}))


@pytest.mark.slow
def test_codes_and_scales_of_the_trainer_are_followed(tmp_path, vllm_pool):
    """A checkpoint that is quantized itself: bytes as any others."""
    store, folder = tmp_path / "run", tmp_path / "base"
    save_model(make_model(), folder)
    weights = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
    save_stored(weights, folder)
    publisher = Publisher(store, lambda: stored(weights), anchors=None)
    own = {"nursery": vllm_pool.nursery}
    with (
        serving(folder, log=tmp_path / "log", **own) as server,
        following(store, server) as replica,
        Replica(store, tmp_path / "mirror") as files,
    ):
        assert server.checksums() == served(weights)
        for number in range(4):
            if number:
                plant(weights, number)
                for value in weights.values():
                    value[torch.rand(value.shape) < 0.02] += 0.01
            publisher.publish().wait()
            replica.pull()
            files.pull()
            assert server.checksums() == served(weights)
            assert server.weight_version == str(number)
            found, wanted = load_file(tmp_path / "mirror/model.safetensors"), stored(weights)
            assert {name: sha256(value) for name, value in found.items()} == {
                name: sha256(value) for name, value in wanted.items()
            }
        ours = answers(server)
        save_stored(weights, folder)
        with serving(folder, extension=None, log=tmp_path / "fresh", **own) as fresh:
            assert server.checksums() == fresh.checksums()
            assert ours == answers(fresh)
        replica.close()
        # bf16 is no checkpoint for this server, and that is said before anything is written.
        kept = server.checksums()
        with Publisher(tmp_path / "other", weights) as other:
            other.publish().wait()
        with following(tmp_path / "other", server) as wrong, pytest.raises(EngineRejected, match="weight_scale"):
            wrong.pull()
        assert server.checksums() == kept
    publisher.close()


def ask(server, method, *arguments):
    server.client.post("/collective_rpc", json={"method": method, "args": arguments}).raise_for_status()


def derived(replica):
    """The digest of codes and scales, computed from all of them."""
    engine = replica.target.engine
    engine.digest()
    return engine.status().derived
