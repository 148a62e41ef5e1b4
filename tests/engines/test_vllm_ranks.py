"""Real vLLM servers whose weights are divided between two ranks."""

from importlib.util import find_spec

import pytest

from deltawire import Publisher
from deltawire.errors import EngineBroken, EngineRejected, UnsupportedFormat
from support.vllm_server import FAULTY, PROMPTS, Trainer, following, serving

if find_spec("vllm") is None:  # its import takes seconds, which servers need and not this file
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_two_ranks_answer_as_those_of_a_fresh_server(kind, tmp_path, vllm_pool):
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, kind=kind)
    with vllm_pool.server(kind, tp=2, extension=FAULTY) as server, following(store, server) as replica:
        for density in (0, 0.02):
            version = trainer.publish(tp=2, density=density)
            replica.pull()
        asked = [server.complete(prompt)[:2] for prompt in PROMPTS]
    with serving(trainer.checkpoint(), tp=2, log=tmp_path / "log", nursery=vllm_pool.nursery) as other:
        assert other.checksums() == trainer.expected[version]
        assert [other.complete(prompt)[:2] for prompt in PROMPTS] == asked


def test_error_on_one_rank(tmp_path, vllm_pool):
    """One of two workers fails while it writes, once or for good: the server stays usable, the version true."""
    trainer = Trainer(tmp_path, f"memory:{tmp_path}", kind="moe")
    trainer.publish(density=0, tp=2)
    with (
        vllm_pool.server("moe", tp=2, extension=FAULTY) as server,
        following(f"memory:{tmp_path}", server) as replica,
    ):
        replica.pull()

        def fail(**how):
            body = {"method": "fail", "args": [how]}
            server.client.post("/collective_rpc", json=body).raise_for_status()

        version = trainer.publish(tp=2)
        fail(rank=1, writes=1)
        replica.pull()  # written again, at once
        assert server.weight_version == str(version)
        assert server.checksums() == trainer.expected[version]

        trainer.publish(tp=2)
        fail(rank=1, writes=2)
        with pytest.raises(EngineRejected, match="rolled back"):
            replica.pull()
        assert replica.version == version
        assert server.weight_version == str(version)
        assert server.checksums() == trainer.expected[version]
        assert server.complete([1, 2, 3])[2] == "length"
        replica.pull()
        assert server.checksums() == trainer.expected[version + 1]

        # A norm is on both ranks, and both are looked at.
        digest = replica.target.mirror.state().digest
        for expected in (False, True):
            body = {"method": "spoil", "args": [1, "model.norm.weight"]}
            server.client.post("/collective_rpc", json=body).raise_for_status()
            assert (replica.target.engine.digest() == digest) == expected

        trainer.publish(tp=2)
        fail(rank=1, writes=2, undos=2)
        with pytest.raises(EngineBroken, match="restart"):
            replica.pull()
        assert replica.version is None
        assert server.weight_version == str(version + 1)
        assert server.client.get("/is_paused").json()["is_paused"]


def test_two_ranks_without_a_mirror(tmp_path, vllm_pool):
    """Each rank decodes its part of a delta against the weights that it serves."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, kind="moe", encoding="mirrorless")
    trainer.publish(density=0, tp=2)
    with (
        vllm_pool.server("moe", tp=2, extension=FAULTY) as server,
        following(store, server, False) as replica,
    ):
        replica.pull()
        for num_versions in (1, 1, 3):
            for _ in range(num_versions):
                version = trainer.publish(tp=2)
            pulled = replica.pull()
            assert (pulled.version, pulled.anchor) == (version, False)
            assert server.weight_version == str(version)
            assert server.checksums() == trainer.expected[version]

        trainer.publish(tp=2)
        body = {"method": "fail", "args": [{"rank": 1, "writes": 2}]}
        server.client.post("/collective_rpc", json=body).raise_for_status()
        with pytest.raises(EngineRejected, match="rolled back"):
            replica.pull()
        assert server.checksums() == trainer.expected[version]
        version = replica.pull().version
        assert server.checksums() == trainer.expected[version]

        # What a rank cannot decode is refused by name, before it is fetched, and goes round by an anchor.
        trainer.publisher.close()
        trainer.publisher = Publisher(store, trainer.weights, anchors=None, encoding="context")
        trainer.publish(tp=2)
        with pytest.raises(UnsupportedFormat, match='use a mirror, or publish with encoding="mirrorless"'):
            replica.pull()
        assert replica.version == version
        assert server.checksums() == trainer.expected[version]
        version = trainer.publish(tp=2, anchor=True)
        assert replica.pull().anchor
        assert server.checksums() == trainer.expected[version]
