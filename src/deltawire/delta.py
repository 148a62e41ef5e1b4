"""The bottom layer, pure: two sets of weights to a delta, and a delta onto weights."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deltawire import parts
from deltawire.boxes import Box
from deltawire.codec import EncodingChoice, allowed_encodings
from deltawire.container import Container
from deltawire.errors import BaseMismatch, DigestMismatch, ShapeMismatch, UnknownParameter
from deltawire.names import check_names, resolve_ties
from deltawire.patches import Patch, decode_entry, decode_part, describe, encode_box, matching, patch_digest
from deltawire.state import Digest, digest, tensor_digest
from deltawire.weights import (
    DTypeChoice,
    Weights,
    aliases_of,
    mapping_of,
    num_elements,
    untied_name,
    view,
    writable,
    write,
)
from deltawire.wire import Entry, Facts, part_bytes
from deltawire.workers import Workers

# Called with the name of a tensor and its number of elements when it is done.
Progress = Callable[[str, int], None]


class Delta:
    """What turns one version of the weights into another. Made by `diff`, or read from a file."""

    def __init__(self, facts: Facts, entries: list[Entry]) -> None:
        self.facts = facts
        self.entries = entries

    @property
    def run(self) -> str:
        return self.facts.run

    @property
    def version(self) -> int:
        return self.facts.version

    @property
    def base_version(self) -> int:
        return self.facts.base_version

    @property
    def base_digest(self) -> Digest:
        """The digest of the weights that this delta applies to."""
        return self.facts.base_digest

    @property
    def digest(self) -> Digest:
        """The digest of the weights that it leads to."""
        return self.facts.digest

    @property
    def tied(self) -> Mapping[str, str]:
        return self.facts.tied

    @property
    def num_changed(self) -> int:
        return self.facts.num_changed

    @property
    def num_elements(self) -> int:
        """The elements of all tensors of the model, changed or not."""
        return self.facts.num_elements

    def __repr__(self) -> str:
        return (
            f"Delta(run={self.run!r}, version={self.version}, base_version={self.base_version}, "
            f"num_changed={self.num_changed}, num_elements={self.num_elements}, num_bytes={self.num_bytes})"
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(entry.num_bytes for entry in self.entries)

    def patches(
        self,
        weights: Weights | None = None,
        *,
        boxes: Mapping[str, Box] | None = None,
        dtype: DTypeChoice = None,
        threads: int | None = None,
    ) -> Iterator[Patch]:
        """Absolute positions and new bits, tensor by tensor.

        `gap` and `context` are made against the old weights, so they need those; `coo` and `dense` do not. A reader
        that holds shards names them in `boxes`: weights[name] is then that box of its tensor, and the patch has only
        what lies in it. `context` cannot be read so, as it needs the whole tensor.
        """

        def decode_one(entry: Entry, workers: Workers) -> Patch | None:
            if boxes is not None and entry.name in boxes:
                shard = None if weights is None else view(entry.name, weights[entry.name], dtype)
                return decode_part(entry, boxes[entry.name], shard, workers)
            return decode_entry(entry, None if weights is None else matching(entry, weights, dtype), workers)

        with Workers(threads) as workers:
            for _, patch in workers.spread(self.entries, lambda entry: entry.box.num_elements, decode_one):
                if patch is not None:
                    yield patch

    def to_bytes(self) -> bytes:
        """The delta as one safetensors file."""
        return b"".join(part_bytes(self.facts, self.entries))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Delta":
        return cls(*parts.merge([Container(data)]))

    def save(self, path: str | Path, *, max_file_bytes: int = parts.MAX_FILE_BYTES) -> list[Path]:
        """Write one file, or several named `STEM-00001-of-0000N.safetensors` where it is larger; the paths written."""
        return parts.save(self.facts, self.entries, Path(path), max_file_bytes)

    @classmethod
    def load(cls, path: str | Path) -> "Delta":
        """Open a delta by the path it was saved to. Its arrays are read when they are needed."""
        return cls(*parts.merge(parts.find(Path(path))))


def diff(
    old: Weights,
    new: Weights,
    *,
    encoding: EncodingChoice = "auto",
    dtype: DTypeChoice = None,
    tied: Mapping[str, str] | None = None,
    run: str = "",
    version: int = 1,
    base_version: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Find every changed bit between two sets of weights and encode it.

    `encoding` is `auto` (the smallest for each tensor), `mirrorless` (the smallest of those that need at most the old
    bits at the changed positions), the name of an encoding, or several names to choose from. `tied` maps names to the
    names that they share their weights with.
    """
    entries: list[Entry] = []
    facts = diff_into(
        entries.append, old, new, encoding=encoding, dtype=dtype, tied=tied, run=run, version=version,
        base_version=base_version, threads=threads, progress=progress,
    )  # fmt: skip
    return Delta(facts, entries)


def diff_into(
    add: Callable[[Entry], None],
    old: Weights,
    new: Weights,
    *,
    encoding: EncodingChoice,
    dtype: DTypeChoice,
    tied: Mapping[str, str] | None,
    run: str,
    version: int,
    base_version: int,
    threads: int | None,
    progress: Progress | None,
) -> Facts:
    """`diff`, with each entry handed on as soon as it is made."""
    allowed = allowed_encodings(encoding)
    old, new = mapping_of(old), mapping_of(new)
    tied = resolve_ties(tied or {}, old)
    names = [name for name in old if name not in tied]
    _check_names(names, [name for name in new if name not in tied])
    if not 0 <= base_version < version:
        raise ValueError(f"version {version} cannot be built on version {base_version}")

    def compare(name: str, workers: Workers) -> tuple[Entry | None, Digest, Digest, int]:
        before, after = view(name, old[name], dtype), view(name, new[name], dtype)
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            raise ShapeMismatch(
                f"{name} is {describe(before)} in the old weights and {describe(after)} in the new ones: "
                "a delta keeps shapes and dtypes, publish an anchor instead",
                tensor=name, expected=describe(before), actual=describe(after),
            )  # fmt: skip
        was = tensor_digest(name, before, workers)
        entry, gain = encode_box(name, before.dtype, before.bits, after.bits, Box.whole(before.shape), allowed, workers)
        return entry, was, gain, len(before.bits)

    base_digest = new_digest = Digest()
    total = num_changed = 0
    changed_names = set()
    with Workers(threads) as workers:
        for name, (entry, was, gain, size) in workers.spread(names, lambda name: num_elements(new, name), compare):
            if entry is not None:
                add(entry)
                changed_names.add(name)
                num_changed += entry.num_changed
            base_digest, new_digest = base_digest + was, new_digest + was + gain
            total += size
            if progress is not None:
                progress(name, size)
    return Facts(
        run=run,
        version=version,
        base_version=base_version,
        base_digest=base_digest,
        digest=new_digest,
        num_changed=num_changed,
        num_elements=total,
        tied={name: to for name, to in tied.items() if to in changed_names},
    )


def apply(
    delta: Delta,
    weights: Weights,
    *,
    base_digest: Digest | None = None,
    dtype: DTypeChoice = None,
    threads: int | None = None,
) -> Digest:
    """Change weights in place to the delta's version, or raise and leave them as they were. The new digest.

    Everything is decoded and checked before the first write: names, shapes and dtypes, the digest of the weights as
    they are, and the digest that they will have. Pass `base_digest` where the digest of the weights is known, to save
    the scan of all of them.
    """
    weights = mapping_of(weights)
    for entry in delta.entries:
        matching(entry, weights, dtype)
    aliases = aliases_of(delta.tied)
    names = {name: None for entry in delta.entries for name in (entry.name, *aliases.get(entry.name, []))}
    values = writable(weights, [name for name in names if name in weights], delta.tied)
    differing = untied_name(weights, delta.tied, dtype)
    if differing is not None:
        raise ValueError(f"{differing} is tied to {delta.tied[differing]} in the run, and has other weights here")
    if base_digest is None:
        base_digest = digest(weights, dtype=dtype, tied=delta.tied, threads=threads)
    check_base(delta.facts, base_digest)

    def prepare(entry: Entry, workers: Workers) -> tuple[Patch, Digest]:
        old = matching(entry, weights, dtype)
        patch = decode_entry(entry, old, workers)
        return patch, patch_digest(patch, old, workers)

    patches = []
    reached = base_digest
    with Workers(threads) as workers:
        for _, (patch, gain) in workers.spread(delta.entries, lambda entry: entry.box.num_elements, prepare):
            patches.append(patch)
            reached += gain
    check_reached(delta.facts, reached)
    for patch in patches:
        for name in (patch.name, *aliases.get(patch.name, [])):
            if name in values:
                write(values[name], patch.where, patch.bits)
    return reached


def check_base(facts: Facts, actual: Digest) -> None:
    if actual != facts.base_digest:
        raise BaseMismatch(
            f"these are not the weights of version {facts.base_version} that the delta was made for: "
            f"their digest is {actual}, not {facts.base_digest}",
            version=facts.base_version, expected=str(facts.base_digest), actual=str(actual),
        )  # fmt: skip


def check_reached(facts: Facts, actual: Digest) -> None:
    if actual != facts.digest:
        raise DigestMismatch(
            f"the delta leads to digest {actual}, not to {facts.digest} as it states for version {facts.version}: "
            "it is damaged, get it again",
            version=facts.version, expected=str(facts.digest), actual=str(actual),
        )  # fmt: skip


def _check_names(old: list[str], new: list[str]) -> None:
    for missing, where in ((set(old) - set(new), "new"), (set(new) - set(old), "old")):
        if missing:
            raise UnknownParameter(
                f"{min(missing)} is not in the {where} weights: a delta keeps all tensors, publish an anchor instead",
                tensor=min(missing),
            )
    check_names(old)
