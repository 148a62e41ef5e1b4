"""Checkpoints: a safetensors file, or a folder of them with the usual index. An anchor says its version inside."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from deltawire.container import MOST_HEADER_BYTES, Container, beside, header_bytes, lay_out, raw, replacing
from deltawire.disk import read_small
from deltawire.dtypes import DTYPES, Bits, dtype_named
from deltawire.errors import Conflict, CorruptObject, LimitExceeded, ObjectMissing
from deltawire.names import PREFIX, check_names, resolve_ties
from deltawire.state import Digest, digest
from deltawire.weights import DTypeChoice, Form, Tensor, Weights, mapping_of, view
from deltawire.wire import FORMAT_VERSION, read_number, read_tied

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Beside the weights of a mirror: what they are now, since their own headers stay as they were.
STATE_NAME = "deltawire.json"
MOST_STATE_BYTES = 16_000_000
MAX_SHARD_BYTES = 5_000_000_000


class Checkpoint(Mapping[str, Tensor]):
    """A checkpoint opened for reading: a file, or a folder. Each tensor is read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise ObjectMissing(f"{path} does not exist", path=str(path))
        self.shards = self._open_folder() if self.path.is_dir() else {self.path.name: Container(self.path)}
        self._shard_of: dict[str, Container] = {}
        for file, shard in self.shards.items():
            for name in shard.header.slots:
                if name in self._shard_of:
                    raise CorruptObject(f"tensor {name!r} is in two files of {path}, one is {file}", tensor=name)
                self._shard_of[name] = shard
        self.metadata = dict(next(iter(self.shards.values())).header.metadata)
        if self.path.is_dir() and (self.path / STATE_NAME).is_file():
            self.metadata |= _read_state(self.path / STATE_NAME)

    def _open_folder(self) -> dict[str, Container]:
        indexes = sorted(file for file in self.path.glob("*.safetensors.index.json") if file.is_file())
        files = sorted(file.name for file in self.path.glob("*.safetensors") if file.is_file())
        if len(indexes) == 1:
            files = _index_files(indexes[0])
        elif SINGLE_NAME in files:
            files = [SINGLE_NAME]
        elif len(files) != 1:
            found = (
                f"{len(files)} safetensors files and {len(indexes)} indexes"
                if files or indexes
                else "no safetensors file"
            )
            raise ObjectMissing(f"{self.path} is not a checkpoint: it has {found}", path=str(self.path))
        return {file: Container(self.path / file) for file in files}

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard_of[name]
        dtype, shape = self.form(name)
        return Tensor(dtype_named(dtype), shape, shard.bits(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._shard_of))

    def __len__(self) -> int:
        return len(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def form(self, name: str) -> Form:
        slot = self._shard_of[name].header.slots[name]
        return slot.dtype, slot.shape

    def num_elements(self, name: str) -> int:
        return prod(self.form(name)[1])

    @property
    def tied(self) -> dict[str, str]:
        """Names that share the weights of others, where the checkpoint is an anchor that says so."""
        return read_tied(self.fact("tied"))

    def other_files(self) -> list[Path]:
        """What lies beside the weights in a folder: configuration, tokenizer and so on."""
        if not self.path.is_dir():
            return []
        weights = {STATE_NAME, *self.shards, *(index.name for index in self.path.glob("*.safetensors.index.json"))}
        return sorted(file for file in self.path.iterdir() if file.is_file() and file.name not in weights)

    @property
    def version(self) -> int | None:
        """The version that an anchor states."""
        text = self.fact("version")
        return None if text is None else read_number(text, "version")

    def fact(self, key: str) -> str | None:
        """What the metadata says under `deltawire.KEY`, if it does."""
        return self.metadata.get(PREFIX + key)


def _read_state(path: Path) -> dict[str, str]:
    try:
        told = json.loads(read_small(path, MOST_STATE_BYTES))
        return {PREFIX + key: str(told[key]) for key in ("run", "version", "digest")}
    except (LimitExceeded, ValueError, KeyError, TypeError, RecursionError):
        raise CorruptObject(f"{path} does not say run, version and digest", path=str(path)) from None


def _index_files(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(read_small(index, MOST_HEADER_BYTES))["weight_map"].values()))
        plain = all(isinstance(file, str) and Path(file).name == file for file in files)
    except (LimitExceeded, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        plain = False
    if not plain or not files:
        raise CorruptObject(f"{index} has no weight_map from tensors to file names", path=str(index))
    return files


def save_anchor(
    weights: Weights,
    path: str | Path,
    *,
    run: str = "",
    version: int = 0,
    dtype: DTypeChoice = None,
    tied: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int | None = None,
) -> Digest:
    """Write all weights as a checkpoint that says its version and digest; the digest.

    A path that ends in `.safetensors` becomes one file, any other a folder, which must not exist yet, with one file or,
    above `max_shard_bytes`, several and an index. Tied names are left out, as transformers does.
    """
    path, weights = Path(path), mapping_of(weights)
    tied = resolve_ties(tied or {}, weights)
    check_names(weights)
    state = digest(weights, dtype=dtype, tied=tied, threads=threads)
    forms = {}
    for name in weights:
        if name not in tied:
            tensor = view(name, weights[name], dtype)
            forms[name] = tensor.dtype.name, tensor.shape
    num_elements = sum(prod(shape) for _, shape in forms.values())
    metadata = {"format": "pt"} | anchor_facts(run, version, state, num_elements, tied)
    single = path.suffix == ".safetensors"
    shards = split_shards(forms, None if single else max_shard_bytes)
    write_checkpoint(path, shards, metadata, lambda name: view(name, weights[name], dtype).bits)
    return state


def anchor_facts(run: str, version: int, state: Digest, num_elements: int, tied: Mapping[str, str]) -> dict[str, str]:
    """The metadata that makes a checkpoint an anchor."""
    facts = {
        "format": str(FORMAT_VERSION),
        "kind": "anchor",
        "run": run,
        "version": str(version),
        "digest": str(state),
        "total": str(num_elements),
    }
    if tied:
        facts["tied"] = json.dumps(dict(tied), separators=(",", ":"))
    return {PREFIX + key: value for key, value in facts.items()}


def split_shards(forms: Mapping[str, Form], max_shard_bytes: int | None) -> dict[str, dict[str, Form]]:
    """Which tensors go into which file: all into one, or as many files as the limit asks for."""
    return name_shards(group_forms(forms, max_shard_bytes))


def group_forms(forms: Mapping[str, Form], max_shard_bytes: int | None) -> list[dict[str, Form]]:
    """Tensors in groups of a limited size, or in one; there is one at least."""
    groups: list[dict[str, Form]] = [{}]
    filled = 0
    for name in sorted(forms):
        dtype, shape = forms[name]
        size = prod(shape) * DTYPES[dtype].itemsize
        if max_shard_bytes is not None and groups[-1] and filled + size > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = forms[name]
        filled += size
    return groups


def name_shards(groups: list[dict[str, Form]]) -> dict[str, dict[str, Form]]:
    """Files for groups of tensors, named as those of any checkpoint."""
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def write_checkpoint(
    path: Path,
    shards: Mapping[str, Mapping[str, Form]],
    metadata: Mapping[str, str],
    bits_of: Callable[[str], Bits],
    *,
    extra_files: list[Path] | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint tensor by tensor. It appears at `path` only when all is written and `check` did not raise."""
    if path.suffix == ".safetensors":
        (forms,) = shards.values()
        with replacing(path) as file:
            for piece in _shard_bytes(forms, metadata, bits_of):
                file.write(piece)
            check()
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Conflict(f"{path} exists already: choose another name, or remove it", path=str(path))
    temporary = beside(path)
    temporary.mkdir()
    try:
        for name, forms in shards.items():
            with replacing(temporary / name) as file:
                for piece in _shard_bytes(forms, metadata, bits_of):
                    file.write(piece)
        if len(shards) > 1:
            with replacing(temporary / INDEX_NAME) as file:
                file.write(index_bytes(shards))
        for extra in extra_files or []:
            shutil.copy2(extra, temporary / extra.name)
        check()
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _shard_bytes(
    forms: Mapping[str, Form], metadata: Mapping[str, str], bits_of: Callable[[str], Bits]
) -> Iterator[bytes | memoryview]:
    slots = lay_out(forms)
    yield header_bytes(slots, metadata)
    for name in slots:
        yield raw(bits_of(name))


def index_bytes(shards: Mapping[str, Mapping[str, Form]]) -> bytes:
    size = sum(prod(shape) * DTYPES[dtype].itemsize for forms in shards.values() for dtype, shape in forms.values())
    weight_map = {name: file for file, forms in shards.items() for name in forms}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
