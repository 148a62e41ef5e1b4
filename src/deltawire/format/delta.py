"""Deltas without a store: `diff` computes one from two sets of weights, also in files; `replay.py` applies it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.disk import local_path
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.format import parts
from deltawire.format.checkpoint import Checkpoint
from deltawire.format.container import Container, naming
from deltawire.format.patches import Patch, check_known, decode_entry, decode_part, describe, encode_box, matching
from deltawire.format.wire import DeltaInfo, Entry, check_stated, part_bytes
from deltawire.tensors.boxes import Box
from deltawire.tensors.digest import Digest, WeightVersion, tensor_digest
from deltawire.tensors.names import Ties, check_names, resolve_ties
from deltawire.tensors.weights import DTypeChoice, Viewed, Weights, mapping_of, num_elements, view
from deltawire.workers import Workers

# Called with the name and the number of elements of each tensor that is done.
Progress = Callable[[str, int], None]


class Delta:
    """The changes from one version of the weights to another. Computed by `diff`, or read with `load`.

    Attributes:
        run: The id of the run.
        version: The version that the delta leads to.
        base_version: The version that it applies to.
        base_digest: The digest of the weights that it applies to.
        digest: The digest of the weights after it.
        tied: Names that share the weights of a tensor that the delta changes.
        num_changed: How many elements change.
        num_elements: The number of elements of the whole model, changed or not.
        files: The paths of its parts on disk, if it has any.
    """

    def __init__(self, info: DeltaInfo, entries: list[Entry], files: Sequence[Path] = ()) -> None:
        self.info, self.entries, self.files = info, entries, files
        self.run, self.version, self.base_version = info.run, info.version, info.base_version
        self.base_digest, self.digest, self.tied = info.base_digest, info.digest, info.tied
        self.num_changed, self.num_elements = info.num_changed, info.num_elements

    def __repr__(self) -> str:
        return (
            f"Delta(run={self.run!r}, version={self.version}, base_version={self.base_version}, "
            f"num_changed={self.num_changed}, num_elements={self.num_elements}, num_bytes={self.num_bytes})"
        )

    @property
    def num_bytes(self) -> int:
        """The encoded size in bytes, without headers."""
        return sum(entry.num_bytes for entry in self.entries)

    def patches(
        self,
        weights: Weights | None = None,
        *,
        boxes: Mapping[str, Box] | None = None,
        dtype: DTypeChoice = None,
        threads: int | None = None,
    ) -> Iterator[Patch]:
        """Decode the delta tensor by tensor, into absolute positions and new bits.

        Args:
            weights: The weights before the delta. Needed for `gap` and `context`, not for `coo` and `dense`.
            boxes: The shards that a sharded reader holds: `weights[name]` is then this box of its tensor, and the patch
                has only the changes inside it. Not supported for `context`, which needs the whole tensor.
            dtype: What the bits of integer arrays mean, as for `diff`.
            threads: Number of threads (default: all available cores).

        Raises:
            CorruptObject: The delta is damaged, or `weights` are not its base.
            UnknownParameter: The weights lack a tensor that the delta changes.
            ShapeMismatch: A tensor has another shape or dtype than in the delta.
            ValueError: An encoding needs weights that were not given.
        """
        base = None if weights is None else Viewed(mapping_of(weights), dtype)

        def decode_one(entry: Entry, workers: Workers) -> Patch | None:
            if boxes is not None and entry.name in boxes:
                if base is not None:
                    check_known(entry, base)
                return decode_part(entry, boxes[entry.name], None if base is None else base[entry.name], workers)
            return decode_entry(entry, None if base is None else matching(entry, base), workers)

        with Workers(threads) as workers:
            for _, patch in workers.spread(self.entries, lambda entry: entry.box.num_elements, decode_one):
                if patch is not None:
                    yield patch

    def to_bytes(self) -> bytes:
        """The delta as one safetensors file; ValueError if it has several boxes of a tensor, which `save` can write."""
        return b"".join(part_bytes(self.info, self.entries))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Delta":
        """Read what `to_bytes` returned."""
        return cls(*parts.merge([Container(data)]))

    def save(self, path: str | Path, *, max_file_bytes: int = parts.MAX_FILE_BYTES) -> list[Path]:
        """Write the delta to disk, in place of one that was saved there, and return the paths written.

        Above `max_file_bytes` there are several files, named `STEM-00001-of-0000N.safetensors`.

        Raises:
            Conflict: Something that is no delta is there, such as weights.
        """
        return parts.save(self.info, self.entries, local_path(path), max_file_bytes)

    @classmethod
    def load(cls, path: str | Path) -> "Delta":
        """Open a delta by the path it was saved to. Its arrays are read on access.

        Raises:
            ObjectMissing: There is no such file.
            FormatError: It is not a delta, is damaged, or parts of it are missing.
        """
        return cls.open(parts.find(Path(path)))

    @classmethod
    def open(cls, files: Sequence[Path]) -> "Delta":
        """The same for a delta whose parts are all known."""
        return cls(*parts.merge([Container(file) for file in files]), files)


def diff(
    old: Weights,
    new: Weights,
    *,
    encoding: EncodingChoice = "auto",
    dtype: DTypeChoice = None,
    tied: Ties | None = None,
    run: str = "",
    version: int = 1,
    base_version: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Compute the delta between two sets of weights, exact to the bit.

    Args:
        old: The weights before: arrays or tensors by name, a `Checkpoint`, or a torch module.
        new: The weights after, with the same names, shapes and dtypes.
        encoding: `auto` (the smallest for each tensor), `mirrorless` (the smallest of those that need at most the old
            bits at the changed positions), the name of an encoding, or several names to choose from.
        dtype: What the bits of integer arrays mean (bf16 kept as uint16): one dtype, or a mapping from tensor names.
        tied: Names that share the weights of another name, mapped to that name.
        run: The id of the run, for the header.
        version: The version of the new weights, for the header.
        base_version: The version of the old weights, for the header; it must be lower.
        threads: Number of threads (default: all available cores).
        progress: Called with the name and the number of elements of each tensor that is done.

    Returns:
        The delta, with the digests of both sets of weights.

    Raises:
        UnknownParameter: A tensor is in one set of weights only.
        ShapeMismatch: A tensor has another shape or dtype in the new weights.
    """
    entries: list[Entry] = []
    info = diff_into(
        entries.append, old, new, encoding=encoding, dtype=dtype, tied=tied, run=run, version=version,
        base_version=base_version, threads=threads, progress=progress,
    )  # fmt: skip
    return Delta(info, entries)


def diff_into(
    add: Callable[[Entry], None], old: Weights, new: Weights, *, encoding: EncodingChoice = "auto",
    dtype: DTypeChoice = None, tied: Ties | None = None, run: str = "", version: int = 1, base_version: int = 0,
    threads: int | None = None, progress: Progress | None = None,
) -> DeltaInfo:  # fmt: skip
    """Like `diff`, but pass each entry to `add` as soon as it is encoded."""
    allowed = allowed_encodings(encoding)
    old, new = mapping_of(old), mapping_of(new)
    tied = resolve_ties(tied or {}, old)
    names = [name for name in old if name not in tied]
    others = [name for name in new if name not in tied]
    for name in sorted(set(names) ^ set(others)):
        where = "old" if name in others else "new"
        raise UnknownParameter(
            f"{name} is not in the {where} weights: a delta cannot add or remove tensors, publish an anchor instead",
            tensor=name,
        )
    check_names(names)
    check_stated(run, base_version, version)
    if not base_version < version:
        raise ValueError(f"version must be larger than base_version, but {version} is not larger than {base_version}")

    def compare(name: str, workers: Workers) -> tuple[Entry | None, Digest, Digest, int]:
        before, after = view(name, old[name], dtype), view(name, new[name], dtype)
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            expected, actual = describe(before.dtype, before.shape), describe(after.dtype, after.shape)
            raise ShapeMismatch(
                f"{name} is {expected} in the old weights and {actual} in the new ones: "
                "a delta cannot change shapes or dtypes, publish an anchor instead",
                tensor=name, expected=expected, actual=actual,
            )  # fmt: skip
        was = tensor_digest(name, before, workers)
        entry, gain = encode_box(name, before.dtype, before.bits, after.bits, Box.whole(before.shape), allowed, workers)
        return entry, was, gain, len(before.bits)

    base_digest = gained = Digest()
    total = num_changed = 0
    changed_names = set()
    with Workers(threads) as workers:
        for name, (entry, was, gain, size) in workers.spread(names, lambda name: num_elements(new, name), compare):
            if entry is not None:
                add(entry)
                changed_names.add(name)
                num_changed += entry.num_changed
            base_digest, gained = base_digest + was, gained + gain
            total += size
            if progress is not None:
                progress(name, size)
    base = WeightVersion(run, base_version, base_digest)
    tied = {name: to for name, to in tied.items() if to in changed_names}
    return DeltaInfo.after(base, version, gained, num_changed=num_changed, num_elements=total, tied=tied)


def diff_checkpoints(
    old: Checkpoint, new: Checkpoint, path: Path, *, max_file_bytes: int = parts.MAX_FILE_BYTES, **options: Any
) -> Delta:
    """Like `diff`, with its options, but written to `path` tensor by tensor: the delta may be larger than memory."""
    parts.check_free(path)
    with naming(path):
        scratch = TemporaryFile(dir=path.parent)  # noqa: SIM115
    with scratch as file:
        spool = parts.Spool(file)
        info = diff_into(spool.add, old, new, tied=new.tied, **options)
        parts.save(info, spool.entries, path, max_file_bytes)
    return Delta.load(path)
