"""Real vLLM servers without a mirror, whose workers decode: what goes wrong there is known."""

from importlib.util import find_spec

import pytest

from deltawire.engines.engine import EngineDelta
from deltawire.errors import DeltawireError, EngineUnavailable
from support.vllm_server import FAULTY, Trainer, following, serving

if find_spec("vllm") is None:  # its import takes seconds, which servers need and not this file
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.vllm


def test_faults_while_workers_decode(tmp_path, vllm_pool):
    """Flipped bits, a delta for other weights, two versions at once: the version is that of the weights."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with (
        vllm_pool.server(tied=True, extension=FAULTY) as server,
        following(store, server, False) as replica,
    ):
        replica.pull()
        engine = replica.target.engine
        stage = engine.stage

        def is_true(version=None):
            replica.target.refresh()
            told = int(server.weight_version)
            assert told == replica.version == (told if version is None else version)
            assert server.checksums() == trainer.expected[told]
            assert server.complete([1, 2])[2] == "length"

        trainer.publish()
        version = trainer.publish()  # two without a pull between
        replica.pull()
        is_true(version)

        def damaged(change):
            data = bytearray(change.files[0].read_bytes())
            data[-40] ^= 16
            change.files[0].write_bytes(data)
            stage(change)

        def of_other_weights(change):
            stage(EngineDelta(change.state, change.base, change.files))

        for wrong in (damaged, of_other_weights):
            trainer.publish()
            engine.stage = wrong
            with pytest.raises(DeltawireError):
                replica.pull()
            engine.stage = stage
            is_true()
            version = trainer.publish()
            replica.pull()
            is_true(version)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_decodes(tmp_path):
    """A server of its own, started as users do: it notices that its engine is gone."""
    store = f"memory:{tmp_path}"
    trainer = Trainer(tmp_path, store, tied=True)
    trainer.publish(density=0)
    with (
        serving(tmp_path / "base", log=tmp_path / "log", extension=FAULTY) as server,
        following(store, server, False) as replica,
    ):
        replica.pull()
        server.client.post("/collective_rpc", json={"method": "die_in_decode"}).raise_for_status()
        version = trainer.publish()
        with pytest.raises(DeltawireError):
            replica.pull()
        with pytest.raises(EngineUnavailable):
            replica.target.refresh()
        assert replica.version is None
        server.kill()
        server.start()
        server.wait()
        replica.pull()
        assert int(server.weight_version) == replica.version == version
        assert server.checksums() == trainer.expected[version]
