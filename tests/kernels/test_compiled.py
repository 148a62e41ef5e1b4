"""Compiled kernels on disk: found again, compiled again where they must be, by one process, or in memory."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from deltawire.cli import main
from deltawire.engines.layout import Piece
from deltawire.engines.memory import HostMemory
from deltawire.engines.staged import PieceChange
from deltawire.kernels.cpu import compiled, live, warmup
from deltawire.tensors.digest import tensor_key
from deltawire.tensors.dtypes import DTYPES
from deltawire.workers import SERIAL


def double(x):
    return x + x


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache that is nobody else's."""
    monkeypatch.setattr(compiled, "folders", lambda: [tmp_path])
    monkeypatch.setattr(compiled, "writable_folder", compiled.writable_folder.__wrapped__)
    monkeypatch.setattr(compiled, "warn_once", lambda text: compiled._log.warning(text))
    monkeypatch.setattr(compiled, "compiled_here", [])
    return tmp_path


def used():
    """What a process that calls the kernel has compiled."""
    compiled.compiled_here.clear()
    assert compiled.kernel(double)(21) == 42
    return len(compiled.compiled_here)


def test_what_was_compiled_is_found_again(folder):
    assert used() == 1
    assert used() == 0


def test_other_sources_compile_it_again(folder, monkeypatch):
    assert used() == 1
    monkeypatch.setattr(compiled, "source_stamp", lambda: "other sources")
    assert used() == 1
    assert used() == 0


def test_every_source_counts(monkeypatch, tmp_path):
    sources = [tmp_path / name for name in ("a.py", "b.py")]
    for source in sources:
        source.write_text("1")
    monkeypatch.setattr(compiled, "files", lambda _: tmp_path)
    stamps = {compiled.source_stamp.__wrapped__()}
    for source in sources:
        source.write_text("2")
        stamps.add(compiled.source_stamp.__wrapped__())
    monkeypatch.setattr(compiled.config, "BOUNDSCHECK", 1)
    assert len({*stamps, compiled.source_stamp.__wrapped__()}) == 4


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_is_compiled_again(folder, kind):
    assert used() == 1
    for file in folder.glob(f"*.{kind}"):
        file.write_bytes(file.read_bytes()[:40])
    assert used() == 1


def test_a_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    assert used() == 1
    monkeypatch.setattr(compiled, "writable_folder", lambda: None)
    assert used() == 0


def test_nowhere_to_write_compiles_in_memory_and_says_so(folder, monkeypatch, caplog):
    (folder / "file").touch()
    monkeypatch.setattr(compiled, "folders", lambda: [folder / "file" / "cache"])
    assert used() == 1
    assert "compiling kernels in memory" in caplog.text
    assert str(folder / "file" / "cache") in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_a_disk_that_fills_keeps_nothing_and_says_so(folder, monkeypatch, caplog):
    def save(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled.IndexDataCacheFile, "save", save)
    assert used() == 1
    assert "cannot be kept" in caplog.text


@pytest.mark.process
@pytest.mark.parametrize("num_versions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_unwritable_machine_publishes_and_pulls(tmp_path, num_versions):
    """The whole program, without a folder that it can write: no traceback, one line. A delta needs most kernels."""
    (tmp_path / "file").touch()
    script = """
import sys, numpy as np, deltawire
weights, copy = {"a": np.zeros(5000, np.uint16)}, {}
publisher = deltawire.Publisher("memory:run", weights, dtype="BF16")
with publisher, deltawire.Replica("memory:run", copy) as replica:
    for _ in range(int(sys.argv[1])):
        publisher.publish().wait()
        replica.pull()
        weights["a"][::50] += 1
    weights["a"][::50] -= 1
print(np.array_equal(copy["a"].bits, weights["a"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(num_versions)],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path / "file" / "x")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("deltawire: compiling kernels in memory")


def test_folders(monkeypatch, tmp_path):
    find = compiled.folders.__wrapped__
    monkeypatch.setattr(compiled.config, "CACHE_DIR", str(tmp_path))
    assert [each.parent for each in find()] == [tmp_path]
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, users = find()
    assert beside.name == "__pycache__"
    assert users.parent == tmp_path / "deltawire"


TOY = """
from deltawire.kernels.cpu.compiled import kernel

@kernel
def triple(x):
    return 3 * x
"""


@pytest.mark.process
def test_another_process_waits_for_the_one_that_compiles(folder, monkeypatch):
    """It is started while this one compiles, says that it waits, and then has nothing to compile."""
    own = folder / f"deltawire-{'0' * 16}"
    (folder / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(folder))
    script = (
        f"import sys; sys.path[:0] = {[str(folder), *sys.path]!r}\n"
        "from pathlib import Path; from deltawire.kernels.cpu import compiled\n"
        f"compiled.folders = lambda: [Path({str(own)!r})]\n"
        "import toy; print(toy.triple(5), len(compiled.compiled_here))"
    )
    monkeypatch.setattr(compiled, "folders", lambda: [own])
    toy = importlib.import_module("toy")
    compile_it = toy.triple._compiler.compile
    others = []

    def compile_slowly(*arguments):
        other = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True)
        others.append(other)
        assert "another process is compiling" in other.stderr.readline()
        return compile_it(*arguments)

    monkeypatch.setattr(toy.triple._compiler, "compile", compile_slowly)
    assert toy.triple(5) == 15
    with others[0] as other:
        assert other.stdout.read().split() == ["15", "0"]
    del sys.modules["toy"]


def test_a_process_does_not_wait_for_ever(folder, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(compiled, "locked", lambda *_: None)
    assert used() == 1
    assert "waiting" in caplog.text


WARM = """
import json, sys, tempfile
import numpy as np
from numba.core.dispatcher import Dispatcher
import deltawire
from deltawire.kernels.cpu import blocks, decode, encode, warmup
from deltawire.kernels.cpu import sums as digest
from deltawire.tensors.weights import Tensor
from deltawire.tensors.dtypes import DTYPES

def forms():
    return {(m.__name__, name, str(sig)) for m in (blocks, decode, digest, encode) for name, each in vars(m).items()
            if isinstance(each, Dispatcher) for sig in each.signatures}

warmup.warm_up((16,))
warm = forms()
rng = np.random.default_rng(0)
bits = rng.integers(0, 1 << 16, 100_000, np.uint16)
own = {"a": Tensor(DTYPES["BF16"], (len(bits),), np.zeros_like(bits))}
with tempfile.TemporaryDirectory() as folder:
    weights = {"a": Tensor(DTYPES["BF16"], (len(bits),), bits)}
    run = folder + "/run"
    with deltawire.Publisher(run, weights) as publisher:
        with deltawire.Replica(run, own) as memory, deltawire.Replica(run, folder + "/m") as mirror:
            for step in range(5):
                publisher.publish(step=step).wait()
                memory.pull(), mirror.pull()
                bits[rng.integers(0, len(bits), 1000)] += 1
    deltawire.digest(own)
print(json.dumps(sorted(forms() - warm)))
"""


@pytest.mark.process
def test_warm_kernels_are_all_that_publish_and_pull_use():
    done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_warm_kernels_are_those_of_engines(monkeypatch):
    seen = set()

    def spy(name):
        function = getattr(live, name)

        def call(*arguments):
            seen.add((name, *(str(numba.typeof(each)) for each in arguments)))
            return function(*arguments)

        return call

    monkeypatch.setattr(live, "put", spy("put"))
    warmup.warm_up((16,))
    warm = set(seen)
    seen.clear()
    piece = Piece("a", "flat", 4, 5, 0, 5, (0, 5, 1))
    memory = HostMemory({"flat": torch.zeros(20, dtype=torch.bfloat16)}, SERIAL)
    index = np.array([3, 7], np.uint32)
    (change,) = memory.take([(PieceChange(0, index, np.zeros(2, np.uint16), np.ones(2, np.uint16)), piece)])
    item = (0, piece, tensor_key("a", DTYPES["BF16"], (4, 5)), change)
    assert [each.num_unexpected for each in memory.put([item])] == [0]
    assert seen == warm


def test_warmup_says_what_it_did():
    result = CliRunner().invoke(main, ["warmup", "--bits", "16", "--format", "json"])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["bits"] == [16]
    assert data["seconds"] >= 0
    text = CliRunner().invoke(main, ["warmup", "--bits", "16", "--quiet"])
    assert "kernels are in" in text.stdout
    assert text.stderr == ""


def test_a_warmup_that_keeps_nothing_fails(folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setattr(compiled, "folders", lambda: [folder / "file" / "cache"])
    compiled.compiled_here.append("something")
    result = CliRunner().invoke(main, ["warmup", "--bits", "16"])
    assert result.exit_code == 1
    assert "no kernel was kept" in result.stderr


@pytest.mark.process
def test_ranks_on_a_machine_without_bmi2(tmp_path):
    """It has no instruction for `nth_bit`."""
    program = """
        import sys
        import pytest
        from numba.core.registry import cpu_target
        assert "+bmi2" not in cpu_target.target_context.codegen().magic_tuple()[2]
        sys.exit(pytest.main(["-n0", "-pno:cacheprovider", "-kranks", sys.argv[1]]))
    """
    machine = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program), Path(__file__).with_name("test_kernels.py")]
    done = subprocess.run(command, env=os.environ | machine, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
