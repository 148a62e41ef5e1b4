"""Checkpoints: a safetensors file, or a folder of them with the usual index. Anchors have a version in the header."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, prod
from pathlib import Path

from deltawire.disk import local_path, read_small
from deltawire.errors import Conflict, CorruptObject, LimitExceeded, ObjectMissing
from deltawire.format.container import MOST_HEADER_BYTES, Container, file_bytes, naming, replacing, temp_path
from deltawire.format.parts import MAX_FILE_BYTES, grouped, part_names
from deltawire.format.wire import check_stated, metadata_fields, read_number, read_tied
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.dtypes import Bits, dtype_named
from deltawire.tensors.names import PREFIX, Ties, check_names, is_text, resolve_ties
from deltawire.tensors.weights import (
    DTypeChoice,
    Specs,
    Tensor,
    TensorSpec,
    Viewed,
    Weights,
    mapping_of,
    num_bytes_of,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Next to the weights of a mirror: their current version, since their own headers are not updated.
STATE_NAME = "deltawire.json"
MOST_STATE_BYTES = 16_000_000

# Files next to a checkpoint with the same weights in other formats. A copy with other weights must not have them: an
# engine may prefer them, as vLLM does with consolidated.safetensors.
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors", ".npz"}


class Checkpoint(Mapping[str, Tensor]):
    """A checkpoint on disk, opened for reading as a mapping from names to tensors. Each tensor is read on access.

    Args:
        path: A safetensors file, or a folder with one file or with several and an index.

    Raises:
        ObjectMissing: The path does not exist, or is a folder without a checkpoint.
        CorruptObject: A header or an index is damaged, a tensor is in two files, or in none though the index names it,
            or a folder has an index and `model.safetensors` as well.
        UnsupportedFormat: A tensor has a dtype that is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise ObjectMissing(f"{path} does not exist", path=str(path))
        self._weight_map: Mapping[str, str] = {}
        self.shards = self._open_folder() if self.path.is_dir() else {self.path.name: Container(self.path)}
        self._shard_of: dict[str, Container] = {}
        for file, shard in self.shards.items():
            for name in shard.header.slots:
                if name in self._shard_of:
                    raise CorruptObject(f"tensor {name!r} is in two files of {path}, one of them {file}", tensor=name)
                self._shard_of[name] = shard
        for name, file in self._weight_map.items():
            if self._shard_of.get(name) is not self.shards[file]:
                raise CorruptObject(
                    f"the index of {path} says that {file} has tensor {name!r}: it has not", tensor=name
                )
        self.metadata = dict(next(iter(self.shards.values())).header.metadata)
        if self.path.is_dir() and (self.path / STATE_NAME).is_file():
            self.metadata |= _read_state(self.path / STATE_NAME)

    def _open_folder(self) -> dict[str, Container]:
        # Not with glob, which finds nothing in a folder that cannot be read.
        found = [file for file in self.path.iterdir() if file.is_file()]
        indexes = sorted(file for file in found if file.name.endswith(".safetensors.index.json"))
        files = sorted(file.name for file in found if file.suffix == ".safetensors")
        if len(indexes) == 1:
            self._weight_map = _read_index(indexes[0])
            named = sorted(set(self._weight_map.values()))
            if SINGLE_NAME in files and named != [SINGLE_NAME]:
                # Some programs read the one, some the other.
                problem = f"has both {SINGLE_NAME} and {indexes[0].name}, which names other files: remove one of them"
                raise CorruptObject(f"{self.path} {problem}", path=str(self.path))
            files = named
        elif SINGLE_NAME in files:
            files = [SINGLE_NAME]
        elif len(files) != 1:
            counts = f"{len(files)} safetensors files and {len(indexes)} indexes"
            counts = counts if files or indexes else "no safetensors file"
            raise ObjectMissing(f"{self.path} is not a checkpoint: it has {counts}", path=str(self.path))
        return {file: Container(self.path / file) for file in files}

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard_of[name]
        dtype, shape = self.spec(name)
        return Tensor(dtype_named(dtype), shape, shard.bits(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._shard_of))

    def __len__(self) -> int:
        return len(self._shard_of)

    def __repr__(self) -> str:
        stated = self.field("version")
        version = "" if stated is None else f", version={stated}"
        return f"Checkpoint({str(self.path)!r}, num_tensors={len(self)}{version})"

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def spec(self, name: str) -> TensorSpec:
        """The dtype and shape of a tensor, from the header."""
        slot = self._shard_of[name].header.slots[name]
        return slot.dtype, slot.shape

    def num_elements(self, name: str) -> int:
        return prod(self.spec(name)[1])

    @property
    def tied(self) -> dict[str, str]:
        """Names that share the weights of other names, as stated by an anchor."""
        return read_tied(self.field("tied"))

    def leave_out(self, names: Iterable[str]) -> None:
        """Go on without these tensors, where they are in it."""
        for name in names:
            self._shard_of.pop(name, None)

    def other_files(self) -> list[Path]:
        """The files next to the weights in a folder: configuration, tokenizer and so on, without other weights."""
        if not self.path.is_dir():
            return []
        weights = {STATE_NAME, *self.shards, *(index.name for index in self.path.glob("*.safetensors.index.json"))}
        found = (file for file in self.path.iterdir() if file.is_file() and file.suffix not in OTHER_WEIGHTS)
        return sorted(file for file in found if file.name not in weights)

    @property
    def version(self) -> int | None:
        """The version stated by an anchor or a mirror; None for other checkpoints."""
        text = self.field("version")
        return None if text is None else read_number(text, "version")

    def field(self, key: str) -> str | None:
        """The value of `deltawire.KEY` in the metadata, if there is one."""
        return self.metadata.get(PREFIX + key)


def _read_state(path: Path) -> dict[str, str]:
    state = None
    with suppress(CorruptObject, LimitExceeded, ValueError, KeyError, TypeError, RecursionError):
        state = WeightVersion.parse(json.loads(read_small(path, MOST_STATE_BYTES)))
    if state is None:
        raise CorruptObject(f"{path} does not state run, version and digest", path=str(path))
    return {PREFIX + key: str(value) for key, value in state.as_dict().items()}


def _read_index(index: Path) -> Mapping[str, str]:
    """The file of each tensor."""
    files: dict[str, str] = {}
    with suppress(LimitExceeded, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files = dict(json.loads(read_small(index, MOST_HEADER_BYTES))["weight_map"])
        if not all(Path(file).name == file and is_text(file) and "\0" not in file for file in set(files.values())):
            files = {}
    if not files:
        raise CorruptObject(f"{index} has no weight_map from tensors to file names", path=str(index))
    return files


def save_anchor(
    weights: Weights,
    path: str | Path,
    *,
    run: str = "",
    version: int = 0,
    dtype: DTypeChoice = None,
    tied: Ties | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
    threads: int | None = None,
) -> Digest:
    """Write all weights as a checkpoint that states its version and digest.

    Args:
        weights: Arrays or tensors by name, or a torch module.
        path: One file if it ends in `.safetensors`; otherwise a folder, which must not exist yet or be empty.
        run: The id of the run, for the header.
        version: The version, for the header.
        dtype: What the bits of integer arrays mean (bf16 kept as uint16): one dtype, or a mapping from tensor names.
        tied: Names that share the weights of another name. They are left out, as transformers does.
        max_shard_bytes: A folder gets several files and an index above this size.
        threads: Number of threads (default: all available cores).

    Returns:
        The digest of the weights.

    Raises:
        Conflict: The folder exists already and is not empty.
    """
    check_stated(run, version)
    path, weights = local_path(path), mapping_of(weights)
    tied = resolve_ties(tied or {}, weights)
    check_names(weights)
    state = digest(weights, dtype=dtype, tied=tied, threads=threads)
    own = Viewed(weights, dtype, tied)
    specs = {name: own.spec(name) for name in own}
    num_elements = sum(prod(shape) for _, shape in specs.values())
    metadata = {"format": "pt"} | anchor_info(run, version, state, num_elements, tied)
    shards = name_shards(group_specs(specs, inf if path.suffix == ".safetensors" else max_shard_bytes))
    write_checkpoint(path, shards, metadata, lambda name: own[name].bits)
    return state


def anchor_info(run: str, version: int, state: Digest, num_elements: int, tied: Ties) -> dict[str, str]:
    """The metadata that makes a checkpoint an anchor."""
    stated = {"run": run, "version": str(version), "digest": str(state), "total": str(num_elements)}
    return metadata_fields("anchor", tied, **stated)


def group_specs(specs: Specs, max_shard_bytes: float) -> list[dict[str, TensorSpec]]:
    """Group tensors by a size limit; there is at least one group."""
    groups = grouped(sorted(specs), lambda name: num_bytes_of(specs[name]), max_shard_bytes)
    return [{name: specs[name] for name in group} for group in groups]


def name_shards(groups: list[dict[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    """File names for groups of tensors, as in any Hugging Face checkpoint."""
    return dict(zip(part_names("model", len(groups)), groups, strict=True))


def write_checkpoint(
    path: Path, shards: Mapping[str, Specs], metadata: Mapping[str, str], bits_of: Callable[[str], Bits], *,
    extra_files: Sequence[Path] = (), check: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write a checkpoint tensor by tensor. It appears at `path` once all is written and `check` did not raise."""
    if path.suffix == ".safetensors":
        (specs,) = shards.values()
        with replacing(path) as file:
            file.writelines(file_bytes(specs, metadata, bits_of))
            check()
        return
    check_new(path)
    temporary = temp_path(path)
    with naming(path):
        temporary.mkdir()
    try:
        for name, specs in shards.items():
            with replacing(temporary / name) as file:
                file.writelines(file_bytes(specs, metadata, bits_of))
        if len(shards) > 1:
            with replacing(temporary / INDEX_NAME) as file:
                file.write(index_bytes(shards))
        for extra in extra_files:
            shutil.copy2(extra, temporary / extra.name)
        check()
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def check_new(path: Path) -> None:
    """Raise Conflict unless nothing is there but, at most, an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Conflict(f"{path} already exists: choose another name, or remove it", path=str(path))


def index_bytes(shards: Mapping[str, Specs]) -> bytes:
    size = sum(num_bytes_of(spec) for specs in shards.values() for spec in specs.values())
    weight_map = {name: file for file, specs in shards.items() for name in specs}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
