"""The files of TRL's bucket layout (see `trl.py`): apply them to weights, and write them."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np

from deltawire.errors import CorruptObject, LimitExceeded, UnknownParameter, UnsupportedFormat
from deltawire.format.container import Container, file_bytes
from deltawire.store import Buffer, Stat
from deltawire.tensors.boxes import Positions, Shape
from deltawire.tensors.dtypes import Bits, dtype_named
from deltawire.tensors.weights import Specs, Tensor, Tensors

ANCHOR, DELTA = "anchor", "delta"
BRANCHES = ("v1", "v2", "v3")
# Positions are int32.
MOST_ELEMENTS = (1 << 31) - 1

_KEY = re.compile(r"(anchor|delta)s/step_([0-9]{6,18})\.safetensors")
_FORMATS = {"sparse_weight_patch", "anchor_checkpoint"}
# An early revision wrote this tensor to a delta without changes.
_EMPTY = "__empty_delta__"
# The dtypes that every release of safetensors supports for torch; F8_E8M0 is not among them.
_INTEGERS = {f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)}
_CARRIED = {"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "BOOL", *_INTEGERS}

Changes = Mapping[str, tuple[Positions, Bits]]


@dataclass(frozen=True, slots=True)
class TrlFile:
    step: int
    kind: str
    """`anchor` or `delta`."""
    key: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.step}"


def file_key(kind: str, step: int) -> str:
    return f"{kind}s/step_{step:06}.safetensors"


def file_of(stat: Stat) -> TrlFile | None:
    """Parse the key of an object; None if it is not a file of the layout."""
    named = _KEY.fullmatch(stat.key)
    if named is None or stat.key != file_key(named[1], int(named[2])):
        return None
    return TrlFile(int(named[2]), named[1], stat.key, stat.num_bytes)


def lay_over(weights: dict[str, Tensor], file: TrlFile, container: Container) -> None:
    if _is_sparse(file, container.header.metadata):
        _lay_sparse(weights, file, container)
        return
    for name, slot in container.header.slots.items():
        known = weights.get(name)
        if known is not None and (known.dtype.name, known.shape) != (slot.dtype, slot.shape):
            raise _corrupt(file, f"{name} is {slot.dtype} {list(slot.shape)}, and had another spec before", name)
        weights[name] = Tensor(dtype_named(slot.dtype), slot.shape, container.bits(name))


def _is_sparse(file: TrlFile, metadata: Mapping[str, str]) -> bool:
    """Whether a file has positions and values; checks its header."""
    stated = metadata.get("format"), metadata.get("version")
    if stated[0] not in _FORMATS or stated[1] != "1":
        raise UnsupportedFormat(
            f"{file.key} has format {stated[0]!r}, version {stated[1]!r}; only 'sparse_weight_patch' '1' is read",
            path=file.key, actual=stated,
        )  # fmt: skip
    if metadata.get("model_version", str(file.step)) != str(file.step):
        raise _corrupt(file, f"its header says that it is version {metadata['model_version'][:32]}")
    # One branch writes whole tensors to deltas/ while it does not know what has changed.
    sparse = metadata.get("sparse", str(file.kind == DELTA))
    if sparse not in ("True", "False") or (sparse == "True" and file.kind == ANCHOR):
        raise _corrupt(file, f"its header says sparse={sparse[:32]!r}")
    return sparse == "True"


def _lay_sparse(weights: Tensors, file: TrlFile, container: Container) -> None:
    metadata = container.header.metadata
    encoding = metadata.get("encoding")
    if encoding == "nvcomp_cascaded":
        raise UnsupportedFormat(
            f"{file.key} has positions compressed with nvcomp_cascaded, which only NVIDIA's library can read: start "
            "from a later anchor, or have TRL write encoding 'gap_delta'",
            path=file.key, actual=encoding,
        )  # fmt: skip
    if encoding not in (None, "raw", "gap_delta"):
        raise UnsupportedFormat(
            f"{file.key} has encoding {encoding!r}, which is not supported", path=file.key, actual=encoding
        )
    suffixes = (".indices", ".values") if encoding is None else (".idx", ".val")
    names = _changed_names(file, container, suffixes)
    total = 0
    for name in names:
        positions, bits = _read_change(weights, file, container, name, suffixes)
        weights[name].bits[positions] = bits
        total += len(bits)
    _check_stated(file, metadata, names, total)


def _changed_names(file: TrlFile, container: Container, suffixes: tuple[str, str]) -> list[str]:
    keys = set(container.header.slots) - {_EMPTY}
    names = sorted({key.removesuffix(suffix) for suffix in suffixes for key in keys if key.endswith(suffix)})
    pairs = {name + suffix for name in names for suffix in suffixes}
    if pairs != keys:
        raise _corrupt(file, f"its tensors are not pairs of positions and values: {min(pairs ^ keys)}")
    return names


def _read_change(
    weights: Tensors, file: TrlFile, container: Container, name: str, suffixes: tuple[str, str]
) -> tuple[Positions, Bits]:
    """The positions and the new bits of one tensor, checked."""
    if name not in weights:
        raise UnknownParameter(f"{file.key} changes {name}, which no anchor has", tensor=name, version=file.step)
    tensor, (where, what) = weights[name], (container.header.slots[name + suffix] for suffix in suffixes)
    if what.dtype != tensor.dtype.name:
        raise _corrupt(file, f"the values of {name} are {what.dtype}, the tensor is {tensor.dtype.name}", name)
    if len(where.shape) != 1 or where.shape != what.shape:
        raise _corrupt(file, f"{name} has positions {list(where.shape)} and values {list(what.shape)}", name)
    is_gaps = container.header.metadata.get("encoding") == "gap_delta"
    if where.dtype not in (("U16", "U32") if is_gaps else ("I32",)):
        raise _corrupt(file, f"the positions of {name} are {where.dtype}", name)
    stored = container.bits(name + suffixes[0])
    positions = np.cumsum(stored.astype(np.int64) + 1) - 1 if is_gaps else stored.view("<i4").astype(np.int64)
    if len(positions) and (positions[0] < 0 or positions[-1] >= len(tensor.bits) or (np.diff(positions) <= 0).any()):
        raise _corrupt(file, f"the positions of {name} do not ascend from 0 to below {len(tensor.bits)}", name)
    return positions, container.bits(name + suffixes[1])


def _check_stated(file: TrlFile, metadata: Mapping[str, str], names: list[str], total: int) -> None:
    """Compare what was found with what the header states, if it does."""
    for key, found in (("num_changed_params", len(names)), ("total_changed_elements", total)):
        if metadata.get(key, str(found)) != str(found):
            raise _corrupt(file, f"{key} is {metadata[key][:32]}, but {found} are there")
    with suppress(ValueError, TypeError, RecursionError):
        if sorted(json.loads(metadata.get("changed_params", json.dumps(names)))) == names:
            return
    raise _corrupt(file, "changed_params does not name the tensors that are there")


def _corrupt(file: TrlFile, problem: str, tensor: str | None = None) -> CorruptObject:
    return CorruptObject(f"{file.key}: {problem}", path=file.key, version=file.step, tensor=tensor)


def check_carried(specs: Specs, *, deltas: bool, branch: str = "v1") -> None:
    """Reject tensors that the layout cannot represent."""
    for name, (dtype, shape) in specs.items():
        if branch == "v3" and ".experts." in name:
            raise UnsupportedFormat(f"{name} belongs to an expert, which readers of v3 refuse: use v1", tensor=name)
        if dtype not in _CARRIED:
            raise UnsupportedFormat(f"{name} is {dtype}, which readers of this layout may not support", tensor=name)
        if deltas and prod(shape) > MOST_ELEMENTS:
            raise LimitExceeded(
                f"{name} has {prod(shape)} elements, but the layout's int32 positions only reach {MOST_ELEMENTS}",
                tensor=name,
            )


def anchor_pieces(version: int, weights: Tensors, branch: str) -> list[Buffer]:
    total = sum(len(tensor.bits) for tensor in weights.values())
    arrays = {name: (tensor.dtype.name, tensor.shape, tensor.bits) for name, tensor in weights.items()}
    return _pieces(arrays, _metadata(version, sorted(weights), total, total, branch, sparse=False))


def delta_pieces(version: int, weights: Tensors, changes: Changes, branch: str) -> list[Buffer]:
    """The bytes of a delta; `weights` are those after it."""
    arrays: dict[str, tuple[str, Shape, Bits]] = {}
    for name, (positions, bits) in changes.items():
        where, what = (".indices", ".values") if branch == "v1" else (".idx", ".val")
        dtype, stored = ("I32", positions.astype("<u4")) if branch == "v1" else _gaps(positions)
        arrays[name + where] = dtype, (len(bits),), stored
        arrays[name + what] = weights[name].dtype.name, (len(bits),), bits
    changed = sum(len(bits) for _, bits in changes.values())
    total = sum(len(weights[name].bits) for name in changes)
    return _pieces(arrays, _metadata(version, sorted(changes), changed, total, branch, sparse=True))


def _gaps(positions: Positions) -> tuple[str, Bits]:
    """The gaps between positions, in 16 bits if all of them fit."""
    gaps = np.diff(positions, prepend=-1) - 1
    return ("U16", gaps.astype("<u2")) if gaps.max() < 1 << 16 else ("U32", gaps.astype("<u4"))


def _metadata(version: int, names: list[str], changed: int, total: int, branch: str, *, sparse: bool) -> dict[str, str]:
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(sparse),
        "model_version": str(version),
        "num_changed_params": str(len(names)),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1.0 - changed / max(total, 1)),
        **({"changed_params": json.dumps(names)} if branch == "v1" else {"encoding": "gap_delta"}),
    }


def _pieces(arrays: Mapping[str, tuple[str, Shape, Bits]], info: Mapping[str, str]) -> list[Buffer]:
    specs = {name: (dtype, shape) for name, (dtype, shape, _) in arrays.items()}
    return list(file_bytes(specs, info, lambda name: arrays[name][2]))
