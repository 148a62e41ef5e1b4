"""A mirror folder: loadable at the version it says, after any crash, and never two writers."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltawire import Checkpoint, Publisher, Replica
from deltawire.errors import Conflict, CorruptObject, EngineRejected
from deltawire.follow.mirror import Mirror
from support.chains import make_run, same


@pytest.fixture
def run(tmp_path):
    """A run in a folder with anchors of several files, and the weights of each version."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "none"}')
    return make_run(10, tmp_path / "run", files=[config], max_file_bytes=20_000, anchors=4)


def check(folder, states, version):
    """The folder says a version, and is it, to every kind of reader."""
    checkpoint = Checkpoint(folder)
    assert checkpoint.version == version
    assert same({name: checkpoint[name] for name in checkpoint}, states[version])
    mirror = Mirror(folder)
    assert mirror.state().version == version
    assert same(mirror.weights(), states[version])
    mirror.close()
    command = [sys.executable, "-m", "deltawire.cli", "verify", str(folder), "--format", "json"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["digest"]


@pytest.mark.process
def test_a_mirror_is_a_checkpoint_at_its_version(run, tmp_path):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        for version in (0, 3, 5, 2, 9):
            replica.pull(version)
            assert same(replica.target.weights(), states[version])
    check(folder, states, 9)
    assert (folder / "config.json").read_text() == '{"model_type": "none"}'
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert sorted(path.name for path in (folder / ".deltawire").iterdir()) in (["cache", "lock"], ["lock"])


def test_a_mirror_goes_on_where_it_was(run, tmp_path):
    url, states = run
    folder = tmp_path / "mirror"
    for version in (1, 4, 9):
        with Replica(url, folder) as replica:
            done = replica.pull(version)
            assert done.anchor == (version == 1)
            assert same(replica.target.weights(), states[version])


def test_one_process_at_a_time(run, tmp_path):
    url, _ = run
    with Replica(url, tmp_path / "mirror"), pytest.raises(Conflict, match="another process"):
        Mirror(tmp_path / "mirror")


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(Conflict, match="not a mirror"):
        Mirror(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(Conflict, match="is a file"):
        Mirror(tmp_path / "file")


def spoiled(folder):
    """The largest file of a mirror, and its bytes with one bit flipped."""
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    return shard, data


@pytest.mark.process
@pytest.mark.parametrize("damage", ["flip", "cut", "no state", "bad state", "no file", "1e400", "5.0", "-5"])
def test_a_damaged_mirror_does_not_lie(run, tmp_path, damage):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
    shard, data = spoiled(folder)
    if damage == "flip":
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-10])
    elif damage == "no file":
        shard.unlink()
    elif damage == "no state":
        (folder / "deltawire.json").unlink()
    elif damage == "bad state":
        (folder / "deltawire.json").write_text('{"version": 5}')
    else:
        text = (folder / "deltawire.json").read_text()
        (folder / "deltawire.json").write_text(text.replace('"version": 5', f'"version": {damage}'))
        with pytest.raises(CorruptObject, match="does not state run, version and digest"):
            Checkpoint(folder)
    with Replica(url, folder) as replica:
        assert replica.version is None
        # Nor do others read of a version that the files do not hold.
        assert damage not in ("flip", "cut", "no file") or not (folder / "deltawire.json").exists()
        replica.pull(6)
        assert same(replica.target.weights(), states[6])
    check(folder, states, 6)


@pytest.mark.process
def test_touched_files_with_the_right_bits_are_fine(run, tmp_path):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
    for shard in folder.glob("*.safetensors"):
        os.utime(shard, (1, 1))
    with Replica(url, folder) as replica:
        assert replica.version == 5
        assert not replica.pull().anchor
    check(folder, states, 9)


def change(folder, how):
    """As another program does."""
    shard, data = spoiled(folder)
    if how == "in place":
        shard.write_bytes(data)
    elif how == "another file":
        (folder.parent / "other").write_bytes(data)
        (folder.parent / "other").replace(shard)
    elif how == "no file":
        shard.unlink()
    elif how == "touched":
        os.utime(shard, (1, 1))


@pytest.mark.process
@pytest.mark.parametrize("how", ["in place", "another file", "no file", "touched"])
def test_what_others_change_while_it_is_open_is_noticed(run, tmp_path, how):
    """Also in tensors that the next delta leaves alone, which its digest does not tell of."""
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
        change(folder, how)
        assert replica.pull(6).anchor == (how != "touched")
        assert same(replica.target.weights(), states[6])
    check(folder, states, 6)


@pytest.mark.process
def test_an_anchor_that_could_not_be_moved_into_place_is_loaded_again(run, tmp_path, monkeypatch):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        fail_once(replica, 5, monkeypatch, "deltawire.follow.mirror.read_small")
        assert replica.version is None
        replica.pull(5)
        assert same(replica.target.weights(), states[5])
    check(folder, states, 5)


def test_killed_while_an_anchor_that_could_not_be_moved_is_deleted(run, tmp_path, monkeypatch):
    """What is left of it is never moved into place: the folder would state a version whose files it lacks."""
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        fail_once(replica, 5, monkeypatch, "deltawire.follow.mirror.Mirror._remove_marker")

        def killed(path, **_):
            for file in path.glob("*.safetensors"):
                file.unlink()
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("deltawire.follow.mirror.shutil.rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                replica.pull(5)
    with Replica(url, folder) as replica:
        assert replica.version is None
        assert not (folder / "deltawire.json").exists()
        replica.pull(5)
        assert same(replica.target.weights(), states[5])
    assert not (folder / ".deltawire" / "made").exists()


def fail(*_):
    raise OSError("once")


def fail_once(replica, version, monkeypatch, name, failing=fail):
    """A pull in which one function fails."""
    with monkeypatch.context() as patch:
        patch.setattr(name, failing)
        with pytest.raises(EngineRejected, match="cannot be written: once"):
            replica.pull(version)


def leave_unfinished(replica, monkeypatch):
    """An update whose journal is there."""
    replica.pull(5)
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_finish_apply", fail)
        with pytest.raises(EngineRejected):
            replica.pull(6)


@pytest.mark.process
def test_an_unfinished_update_of_files_that_others_replaced(run, tmp_path, monkeypatch):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        leave_unfinished(replica, monkeypatch)
    assert (folder / ".deltawire/journal.safetensors").exists()
    for file, shard in Checkpoint(folder).shards.items():
        save_file({name: np.zeros(1, np.uint16) for name in shard.header.slots}, folder / file)
    with Replica(url, folder) as replica:
        assert replica.version is None
        replica.pull(6)
    check(folder, states, 6)


@pytest.mark.parametrize("how", ["in place", "another file", "no file", "not"])
def test_an_update_that_is_tried_again_after_others_have_changed_files(run, tmp_path, monkeypatch, how):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        leave_unfinished(replica, monkeypatch)
        change(folder, how)
        assert replica.pull(6).anchor == (how != "not")
        assert same(replica.target.weights(), states[6])
    check(folder, states, 6)


def test_a_folder_states_no_version_while_a_write_is_tried_again(run, tmp_path, monkeypatch):
    """Also where deleting the file that states it was what failed."""
    url, states = run
    folder = tmp_path / "mirror"
    write = Mirror._write

    def writing(*args):
        assert not (folder / "deltawire.json").exists()
        write(*args)

    with Replica(url, folder) as replica:
        replica.pull(5)
        unlink = Path.unlink
        fail_once(replica, 6, monkeypatch, "pathlib.Path.unlink",
                  lambda path, **how: (fail if path.name == "deltawire.json" else unlink)(path))  # fmt: skip
        monkeypatch.setattr(Mirror, "_write", writing)
        replica.pull(6)
        assert replica.version == 6
        assert same(replica.target.weights(), states[6])


def test_the_journal_is_on_the_disk_before_the_first_write(run, tmp_path, monkeypatch):
    url, _ = run
    folder = tmp_path / "mirror"
    synced, seen = {}, []
    finish = Mirror._finish_apply

    def sync(path):
        synced[path] = sorted(file.name for file in path.iterdir())

    def finishing(*args):
        seen.append(dict(synced))
        finish(*args)

    with Replica(url, folder) as replica:
        replica.pull(5)
        monkeypatch.setattr("deltawire.follow.mirror.sync_folder", sync)
        monkeypatch.setattr(Mirror, "_finish_apply", finishing)
        replica.pull(6)
    assert "journal.safetensors" in seen[0][folder / ".deltawire"]
    assert "deltawire.json" not in seen[0][folder]


POINTS = {
    "journal saved": "deltawire.follow.mirror.Mirror._finish_apply",
    "before telling": "deltawire.follow.mirror.Mirror._write_marker",
    "incoming in place": "deltawire.follow.mirror.Mirror._finish_load",
}


@pytest.mark.process
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("have", "want"), [(None, 3), (3, 7), (8, 2)])
def test_killed_at_a_point(run, tmp_path, point, have, want):
    """Killed for real, in a process of its own; then opened again."""
    url, states = run
    folder = tmp_path / "mirror"
    if have is not None:
        with Replica(url, folder) as replica:
            replica.pull(have)
    program = f"""
        import os, signal, sys
        import deltawire
        from deltawire.follow.mirror import Mirror
        Mirror.{POINTS[point].rpartition(".")[2]} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with deltawire.Replica({str(url)!r}, {str(folder)!r}) as replica:
            replica.pull({want})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True)
    with Replica(url, folder) as replica:
        assert replica.version in (have, want)
        if replica.version is not None:
            assert same(replica.target.weights(), states[replica.version])
        if killed.returncode == 0:
            assert replica.version == want  # the point was not on the way
        replica.pull(want)
    check(folder, states, want)


@pytest.mark.process
def test_a_patch_that_is_half_written_is_finished(run, tmp_path, monkeypatch):
    """Some patches in the mapped files, the journal still there: the next to open finishes it."""
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
        finish = Mirror._finish_apply

        def half(self, patches, state):
            for patch in patches[: len(patches) // 2]:
                self._weights[patch.name].bits[patch.where] = patch.bits
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Mirror, "_finish_apply", half)
        with pytest.raises(EngineRejected, match="the disk is full"):
            replica.pull(6)
        assert replica.version is None
        assert Checkpoint(folder).version is None  # the folder does not say what it is not
        monkeypatch.setattr(Mirror, "_finish_apply", finish)
    Mirror(folder).close()
    check(folder, states, 6)


@pytest.mark.process
def test_a_journal_over_weights_that_someone_has_changed(run, tmp_path, monkeypatch):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
        with monkeypatch.context() as patch:
            patch.setattr(Mirror, "_finish_apply", lambda *_: os.stat(tmp_path / "nothing"))
            with pytest.raises(EngineRejected):
                replica.pull(6)
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x55
    shard.write_bytes(data)
    with Replica(url, folder) as replica:
        assert replica.version is None
        replica.pull()
    check(folder, states, 9)


@pytest.mark.process
def test_a_journal_that_a_disk_has_damaged(run, tmp_path):
    url, states = run
    folder = tmp_path / "mirror"
    with Replica(url, folder) as replica:
        replica.pull(5)
    (folder / ".deltawire" / "journal.safetensors").write_bytes(b"not a journal")
    with Replica(url, folder) as replica:
        assert replica.version is None
        replica.pull()
    check(folder, states, 9)


def test_a_mirror_has_no_copies_of_the_weights_that_are_never_updated(tmp_path):
    """As next to checkpoints of Mistral, whose consolidated.safetensors vLLM prefers: it would serve the base."""
    base, weights = tmp_path / "base", {"w": np.arange(8, dtype=np.float16)}
    base.mkdir()
    for name in ("model.safetensors", "consolidated.safetensors"):
        save_file(weights, base / name)
    for name in ("config.json", "pytorch_model.bin"):
        (base / name).write_text("{}")
    with Publisher(tmp_path / "run", weights) as publisher:
        publisher.publish()
        weights["w"][3] = 9
        publisher.publish()
    with Replica(tmp_path / "run", tmp_path / "mirror", base=base) as replica:
        assert replica.pull().base == 0
    files = {path.name for path in (tmp_path / "mirror").iterdir() if path.is_file()}
    assert files == {"config.json", "deltawire.json", "model.safetensors"}


def test_transformers_loads_a_mirror(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    files = [tmp_path / "base" / "config.json"]
    with Publisher(tmp_path / "run", model, files=files) as publisher:
        publisher.publish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7] *= 1.01
        publisher.publish()
    with Replica(tmp_path / "run", tmp_path / "mirror") as replica:
        assert replica.pull(0).anchor
        assert not replica.pull().anchor
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mirror", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), loaded.state_dict()[name].view(torch.int16)), name
