"""The callback in a real Trainer: a tiny Qwen3, real optimizer steps at an RL learning rate."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from deltawire import Publisher, Replica, ShardedPublisher
from deltawire.errors import ShapeMismatch, StoreUnavailable, UnsupportedPlacement
from deltawire.publish.sources import check_whole, module_source
from support.chains import Hooked
from support.processes import gathered, once, run_ranks, same_bits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Recorder(transformers.TrainerCallback):
    """The bf16 weights after each step, by torch's own cast."""

    def __init__(self):
        self.states, self.logs = {}, []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))

    def on_step_end(self, args, state, control, model=None, **_):
        self.states[state.global_step] = {
            name: parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
            for name, parameter in model.named_parameters()
        }

    on_train_begin = on_step_end


def make_model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def train(model, callbacks, folder, steps):
    trainer = make_trainer(model, callbacks, folder, steps)
    trainer.train()
    return trainer


def make_trainer(model, callbacks, folder, steps):
    tokens = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-6,
        report_to=[], logging_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)


def test_every_version_is_what_the_model_was(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    recorder, callback = Recorder(), DeltawireCallback(tmp_path / "run", every=2, run="tiny", queue_size=9)
    trainer = train(make_model(), [callback, recorder], tmp_path / "out", steps=7)
    with Replica(tmp_path / "run", tmp_path / "mirror") as replica:
        steps = []
        for version in replica.run.versions():
            replica.pull(version)
            step = replica.run.manifest(version).step
            steps.append(step)
            weights = replica.target.weights()
            assert weights.keys() == recorder.states[step].keys()
            assert all(np.array_equal(weights[name].bits, bits) for name, bits in recorder.states[step].items())
        assert steps == [0, 2, 4, 6, 7]
        assert 0 < replica.run.manifest(1).hop.num_changed < replica.run.manifest(1).num_elements / 4
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mirror", dtype=torch.bfloat16)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name).view(torch.int16), parameter.to(torch.bfloat16).view(torch.int16))
    said = [line for line in recorder.logs if "deltawire/publish/num_bytes" in line]
    assert said
    assert all(0 < line["deltawire/publish/all_bytes"] <= line["deltawire/publish/uploaded_bytes"] for line in said)
    sizes = [file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert callback.publisher.metrics()["deltawire/publish/uploaded_bytes"] == sum(sizes)


def test_numbers_are_in_the_log_and_go_to_trackers(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    tracker, callback = Recorder(), DeltawireCallback(tmp_path / "run")
    trainer = make_trainer(make_model(), [tracker, callback], tmp_path / "out", steps=4)
    trainer.train()
    with_loss = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in with_loss] == [2, 4]
    assert all(line["deltawire/publish/failed"] == 0 for line in with_loss)
    assert not any("deltawire/publish/failed" in line for line in tracker.logs)  # the Trainer has called it before
    trainer.state.save_to_json(str(tmp_path / "state.json"))

    callback.go_first(trainer)
    tracker.logs.clear()
    trainer.train()
    assert len(tracker.logs) > 1
    assert all("deltawire/publish/published" in line for line in tracker.logs)
    assert trainer.callback_handler.callbacks.count(callback) == 1


def test_a_reward_that_the_trainer_logs_is_the_versions(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    class Rewards(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            state.log_history[-1]["reward"] = state.global_step / 10

    callback = DeltawireCallback(tmp_path / "run", queue_size=9)
    train(make_model(), [callback, Rewards()], tmp_path / "out", steps=4)
    run = callback.publisher.run
    rewards = {manifest.step: manifest.metadata.get("reward") for manifest in map(run.manifest, run.versions())}
    assert rewards == {0: None, 1: None, 2: None, 3: 0.2, 4: 0.2}, "logged every second step, after its version"


def test_a_first_anchor_that_fails_is_made_up_for_with_its_files(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    store, model = Hooked(str(tmp_path / "run")), make_model()

    def fail(verb, key):
        if verb == "put":
            store.before = lambda verb, key: None
            raise StoreUnavailable("no answer", refused=False, uncertain=False)

    store.before = fail
    callback = DeltawireCallback(store, queue_size=0)
    train(model, [callback], tmp_path / "out", steps=2)
    assert callback.publisher.num_failed == 1
    with Replica(tmp_path / "run", tmp_path / "mirror") as replica:
        replica.pull()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "mirror").hidden_size == 32


class BreaksOff(transformers.TrainerCallback):
    def __init__(self):
        self.breaks = True

    def on_step_end(self, args, state, control, **_):
        if self.breaks:
            self.breaks = False
            raise RuntimeError("out of memory")


def test_training_that_breaks_off_and_starts_again(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    callback = DeltawireCallback(tmp_path / "run")
    trainer = make_trainer(make_model(), [callback, BreaksOff()], tmp_path / "out", steps=3)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    first = callback.publisher
    trainer.train()
    assert first is not callback.publisher
    with pytest.raises(ValueError, match="closed"):
        first.publish()
    assert (first.version, callback.publisher.version, callback.publisher.num_failed) == (1, 4, 0)


def test_training_that_starts_again_after_a_version_that_failed(tmp_path):
    """What failed then is covered now, and does not end the new training."""
    from deltawire.trainers.transformers import DeltawireCallback

    store, model = Hooked(str(tmp_path / "run")), make_model()

    def fail(verb, key):
        if verb == "put" and key.startswith("deltas/"):
            raise StoreUnavailable("no answer", refused=False, uncertain=False)

    store.before = fail
    callback = DeltawireCallback(store)
    trainer = make_trainer(model, [callback, BreaksOff()], tmp_path / "out", steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert not callback.last.join()
    store.before = lambda verb, key: None
    trainer.train()
    assert callback.publisher.num_failed == 0
    with Replica(tmp_path / "run", {}) as replica:
        assert replica.pull().version == callback.publisher.version


def test_a_last_version_that_is_refused_does_not_take_those_before_with_it(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    callback, model = DeltawireCallback(tmp_path / "run", every=10), make_model()
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0.0, log_history=[])
    callback.on_train_begin(None, state, None, model=model)
    files = Path(callback._folder.name)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    state.global_step = 1
    with pytest.raises(ShapeMismatch, match="norm"):
        callback.on_train_end(None, state, None)
    assert callback.publisher.version == 0
    assert not callback.publisher._thread.is_alive()
    assert not files.exists()


def test_a_restarted_training_takes_up_its_run(tmp_path):
    from deltawire.trainers.transformers import DeltawireCallback

    model = make_model()
    train(model, [DeltawireCallback(tmp_path / "run")], tmp_path / "out", steps=3)
    callback = DeltawireCallback(tmp_path / "run")
    train(model, [callback], tmp_path / "out", steps=2)
    assert callback.publisher.version == 5
    assert [callback.publisher.run.manifest(version).hop.base for version in range(6)] == [None, 0, 1, 2, 3, 4]
    with Publisher(tmp_path / "run", module_source(model)) as publisher:
        assert publisher.resumed
    with pytest.raises(ValueError, match="every"):
        DeltawireCallback(tmp_path / "run", every=0)


def publish_with_callback(rank, url):
    """What the Trainer calls, on every rank."""
    from deltawire import ShardedPublisher
    from deltawire.trainers.transformers import DeltawireCallback

    model = fully_shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    state = SimpleNamespace(is_world_process_zero=rank == 0, global_step=0, epoch=0.0, log_history=[{}])
    callback, states, logs = DeltawireCallback(url, every=2, timeout=30), [gathered(model)], {}
    callback.on_train_begin(None, state, None, model=model)
    assert isinstance(callback.publisher, ShardedPublisher)
    for step in range(1, 6):
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step
        callback.on_step_end(None, state, None, model=model)
        states.append(gathered(model))
    callback.on_log(None, state, None, logs=logs)
    callback.on_train_end(None, state, None)
    assert "deltawire/publish/published" in logs
    assert logs == state.log_history[-1]
    return states


@pytest.mark.process
def test_a_sharded_model_is_published_from_all_ranks(tmp_path):
    states = run_ranks(2, publish_with_callback, tmp_path / "run")[0]
    with Replica(tmp_path / "run", tmp_path / "mirror") as replica:
        steps = []
        for version in replica.run.versions():
            replica.pull(version)
            steps.append(replica.run.manifest(version).step)
            state = once(states[steps[-1]], replica.run.manifest(version).tied)
            assert same_bits(replica.target.weights(), state)
        assert steps == [0, 2, 4, 5]
        assert replica.run.manifest(3).hop.base == 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mirror", dtype=torch.bfloat16)
    for name, bits in states[-1].items():
        assert np.array_equal(
            loaded.get_parameter(name).detach().view(torch.int16).numpy().view(np.uint16).ravel(), bits
        )


def wrap_in_first_fsdp(rank, url):
    from deltawire.trainers.transformers import DeltawireCallback

    model = make_model()
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    state = SimpleNamespace(is_world_process_zero=rank == 0, global_step=0, epoch=0.0, log_history=[])
    with pytest.raises(UnsupportedPlacement, match="use FSDP2"):
        DeltawireCallback(url).on_train_begin(None, state, None, model=model)
    with pytest.raises(UnsupportedPlacement, match="use FSDP2"):
        ShardedPublisher(url, model)


@pytest.mark.process
def test_pieces_that_look_like_tensors_are_refused(tmp_path):
    run_ranks(2, wrap_in_first_fsdp, tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    check_whole(model)
    model.weight = torch.nn.Parameter(torch.empty(0))
    model.weight.ds_id = 1
    with pytest.raises(UnsupportedPlacement, match=r"weight is sharded by ZeRO-3"):
        check_whole(model)
