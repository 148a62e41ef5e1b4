"""TRL's layout as each of its branches reads it, and the steps for which two of them write no file.

The readers here know nothing of ours: they are told the names of files, as TRL's were, and look for tensors where their
branch did.
"""

import json
from contextlib import suppress

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from deltawire import Publisher
from deltawire.cli import main
from deltawire.errors import BrokenChain, UnsupportedFormat
from deltawire.interop.trl import TrlBucket, export_trl
from support.trl_layout import SIZE, bits, steps, write_anchor, write_delta


def opened(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def put_flat(weights, name, index, values):
    size = values.element_size()
    assert values.dtype == weights[name].dtype
    flat = weights[name].view(-1).view(torch.uint8).view(-1, size)
    flat.index_copy_(0, index.long(), values.view(torch.uint8).view(-1, size))


class ReaderV1:
    """A snapshot that each anchor replaces; the names of what changed are in the header."""

    def __init__(self):
        self.weights = {}

    def apply(self, path):
        metadata, tensors = opened(path)
        assert (metadata["format"], metadata["version"]) == ("sparse_weight_patch", "1")
        if metadata["sparse"] == "False":
            self.weights = {name: tensors[name].clone() for name in json.loads(metadata["changed_params"])}
            return
        for name in json.loads(metadata["changed_params"]):
            put_flat(self.weights, name, tensors[f"{name}.indices"], tensors[f"{name}.values"])


class ReaderV2:
    """Names are those of tensors that end in .val; positions as the header's encoding says, int32 in the end."""

    def __init__(self):
        self.weights = {}

    def apply(self, path):
        metadata, tensors = opened(path)
        if "anchors" in str(path):
            self.weights |= {name: tensor.clone() for name, tensor in tensors.items()}
            return
        for name in sorted(key.removesuffix(".val") for key in tensors if key.endswith(".val")):
            put_flat(
                self.weights, name, self.positions(tensors[f"{name}.idx"], metadata["encoding"]), tensors[f"{name}.val"]
            )

    def positions(self, stored, encoding):
        assert encoding == "gap_delta"
        assert stored.dtype in (torch.uint16, torch.uint32)
        return (torch.cumsum(stored.to(torch.int64) + 1, 0) - 1).to(torch.int32)


class ReaderV3(ReaderV2):
    """The same, and no experts."""

    def apply(self, path):
        super().apply(path)
        assert not any(".experts." in name for name in self.weights)


READERS = {"v1": ReaderV1, "v2": ReaderV2, "v3": ReaderV3}


@pytest.mark.parametrize("branch", READERS)
def test_each_branch_reads_what_is_exported_for_it(trl_run, tmp_path, branch):
    keys = export_trl(trl_run[0], tmp_path, branch=branch, anchor_every=3)
    reader, bucket = READERS[branch](), TrlBucket(tmp_path)
    for version, expected in enumerate(trl_run[1]):
        for key in (f"anchors/step_{version:06}.safetensors", f"deltas/step_{version:06}.safetensors"):
            if key in keys:
                reader.apply(tmp_path / key)
        assert bits(reader.weights) == expected
        assert bits(bucket.load(version)) == expected
    # Version 4 has changed nothing: v1 has a file that says so, the others have none.
    assert ("deltas/step_000004.safetensors" in keys) == (branch == "v1")
    assert bucket.unwritten(5) == ([] if branch == "v1" else [range(4, 5)])


@pytest.mark.parametrize(("branch", "other"), [("v1", "v2"), ("v2", "v1"), ("v3", "v1")])
def test_a_branch_finds_nothing_in_the_deltas_of_another(trl_run, tmp_path, branch, other):
    """Why there is a choice to be made."""
    export_trl(trl_run[0], tmp_path, branch=branch)
    reader = READERS[other]()
    with suppress(KeyError):
        reader.apply(tmp_path / "anchors/step_000000.safetensors")
        reader.apply(tmp_path / "deltas/step_000001.safetensors")
    assert bits(reader.weights) != trl_run[1][1]


def test_gaps_take_the_width_they_need(tmp_path):
    weights = {"far": torch.zeros(SIZE, dtype=torch.bfloat16), "near": torch.zeros(9, dtype=torch.bfloat16)}
    with Publisher(f"memory:{tmp_path}", weights) as publisher:
        publisher.publish().wait()
        weights["far"][[0, 65536, 65537 + 65536]] = 1.0  # gaps of 65535 and 65536
        weights["near"][8] = 1.0
        publisher.publish().wait()
    export_trl(publisher.run, tmp_path, branch="v2")
    metadata, tensors = opened(tmp_path / "deltas/step_000001.safetensors")
    assert (tensors["far.idx"].dtype, tensors["near.idx"].dtype) == (torch.uint32, torch.uint16)
    assert tensors["far.idx"].tolist() == [0, 65535, 65536]
    assert metadata == {
        "format": "sparse_weight_patch", "version": "1", "sparse": "True", "model_version": "1",
        "num_changed_params": "2", "total_changed_elements": "4", "total_elements": str(SIZE + 9),
        "sparsity": str(1.0 - 4 / (SIZE + 9)), "encoding": "gap_delta",
    }  # fmt: skip
    assert bits(TrlBucket(tmp_path).load()) == bits(weights)


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_steps_without_changes_have_no_file_in_v2_and_v3(tmp_path, encoding):
    weights = steps(3)
    write_anchor(tmp_path, 1, weights[0])
    write_delta(tmp_path, 3, weights[0], weights[1], encoding)
    write_delta(tmp_path, 900_000_000, weights[1], weights[2], encoding)
    bucket = TrlBucket(tmp_path)
    for step, index in ((1, 0), (2, 0), (3, 1), (4, 1), (899_999_999, 1), (900_000_000, 2)):
        assert bits(bucket.load(step)) == bits(weights[index]), step
    assert bucket.unwritten(900_000_000) == [range(2, 3), range(4, 900_000_000)]
    with pytest.raises(BrokenChain, match="step 900000001 is missing"):
        bucket.load(900_000_001)


def test_a_missing_step_among_files_of_v1_is_not_followed(tmp_path):
    weights = steps(4)
    write_anchor(tmp_path, 1, weights[0])
    write_delta(tmp_path, 2, weights[0], weights[1], "gap_delta")
    write_delta(tmp_path, 4, weights[2], weights[3])
    with pytest.raises(BrokenChain, match="step 3 is missing"):
        TrlBucket(tmp_path).load()


def test_what_a_branch_does_not_take_is_refused(tmp_path):
    weights = {"layers.0.mlp.experts.1.w": torch.zeros(4, dtype=torch.bfloat16)}
    with Publisher(f"memory:{tmp_path}", weights) as publisher:
        publisher.publish().wait()
    with pytest.raises(UnsupportedFormat, match=r"experts.*refuse"):
        export_trl(publisher.run, tmp_path / "v3", branch="v3")
    export_trl(publisher.run, tmp_path / "v2", branch="v2")
    with pytest.raises(ValueError, match="branch must be one of v1, v2, v3"):
        export_trl(publisher.run, tmp_path / "v4", branch="v4")


def test_the_commands_know_the_branches(trl_run, tmp_path):
    def told(*arguments):
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result

    folder = trl_run[0].store.url
    told("export", folder, "--to", tmp_path / "bucket", "--layout", "trl", "--branch", "v3")
    result = told("pull", tmp_path / "bucket", "--to", tmp_path / "out", "--layout", "trl", "--format", "json")
    assert json.loads(result.stdout)["unwritten"] == [[4, 4]]
    assert "no file for step 4" in result.stderr
    result = CliRunner().invoke(main, ["export", folder, "--to", "x", "--branch", "v2"])
    assert (result.exit_code, "--branch only works with --layout trl" in result.stderr) == (2, True)
