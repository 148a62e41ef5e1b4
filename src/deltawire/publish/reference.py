"""A checkpoint that lies somewhere already, as the first anchor of a run: named in the manifest, never uploaded."""

import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltawire.errors import CorruptObject, LimitExceeded, ObjectMissing, ShapeMismatch, UnknownParameter
from deltawire.format.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from deltawire.format.container import MOST_HEADER_BYTES
from deltawire.publish.sources import Taken
from deltawire.publish.streams import Stream
from deltawire.publish.upload import is_worth_sending
from deltawire.run.keys import is_file_name
from deltawire.run.manifest import StoredObject
from deltawire.store import Store, open_store
from deltawire.store.transfer import fetch_parts
from deltawire.tensors.weights import Tensor, spec

# Asked for by name where a place cannot be listed.
USUAL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint elsewhere: its URL, its files with their hashes, and the checkpoint itself, on this machine."""

    url: str
    objects: tuple[StoredObject, ...]
    checkpoint: Checkpoint


def hold_reference(owner: Any, place: str | Path, scratch: Path | None) -> Reference:
    """Fetch a checkpoint into a folder that stays as long as `owner` does: later anchors need its other files."""
    folder = Path(tempfile.mkdtemp(prefix="deltawire-base-", dir=scratch))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return open_reference(place, folder)


def files_of(weights: Any) -> list[Path]:
    """The extra files next to a checkpoint that is published."""
    others = weights.other_files() if isinstance(weights, Checkpoint) else []
    return [file.absolute() for file in others if is_worth_sending(file)]


def open_reference(place: str | Path, folder: Path) -> Reference:
    """Fetch a checkpoint into a folder, and hash its files."""
    store, objects = open_store(place), []
    for file in _files(store):
        digest, num_bytes = hashlib.sha256(), store.stat(file).num_bytes
        with (folder / file).open("wb") as written:
            for data in fetch_parts(store, file, num_bytes):
                digest.update(data)
                written.write(data)
        if file.endswith((".safetensors", INDEX_NAME)) or is_worth_sending(folder / file):
            objects.append(StoredObject(file, num_bytes, digest.hexdigest(), file))
    url = str(place) if str(place).startswith("hf://") else store.url
    return Reference(url, tuple(objects), Checkpoint(folder))


def _files(store: Store) -> Iterator[str]:
    """The names of the files of a checkpoint: its weights, and what lies next to them."""
    try:
        index = json.loads(store.get(INDEX_NAME, limit=MOST_HEADER_BYTES))
        weights = sorted(set(index["weight_map"].values()))
        if not all(isinstance(file, str) and is_file_name(file) for file in weights):
            raise ValueError("no file names")
        yield INDEX_NAME
    except ObjectMissing:
        weights = [SINGLE_NAME]
    except (LimitExceeded, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptObject(f"{store.url}: {INDEX_NAME} has no weight_map from tensors to file names") from None
    for file in weights:
        try:
            store.stat(file)
        except ObjectMissing:
            problem = f"{store.url} is not a checkpoint to start from, it has no {file}: check base="
            raise ObjectMissing(problem, path=store.url, key=file) from None
        yield file
    listable = getattr(store, "listable", True)
    names = [stat.key for stat in store.list() if is_file_name(stat.key)] if listable else USUAL_FILES
    for file in names:
        if file not in (*weights, INDEX_NAME) and not file.endswith(".safetensors"):
            with suppress(ObjectMissing):
                store.stat(file)
                yield file


def base_weights(reference: Reference, taken: Taken) -> dict[str, Tensor]:
    """The weights of the checkpoint, by the names of those to publish, which must be the same tensors."""
    checkpoint, where = reference.checkpoint, reference.url
    if isinstance(taken.bits, Stream) or isinstance(taken.live, Stream):
        raise ValueError("weights that come one by one cannot be compared with a checkpoint: leave base= out")
    for name in sorted(set(taken.bits) ^ set(checkpoint)):
        has, lacks = (where, "the weights to publish") if name in checkpoint else ("the model", where)
        raise UnknownParameter(
            f"{has} has {name}, which is not in {lacks}: start without base=, or from another checkpoint", tensor=name
        )
    found = {name: checkpoint[name] for name in checkpoint}
    for name in found:
        expected, actual = spec(taken.bits, name), spec(checkpoint, name)
        if expected != actual:
            raise ShapeMismatch(
                f"{name} is {actual[0]} {list(actual[1])} in {where}, but {expected[0]} {list(expected[1])} in the "
                "weights to publish: start without base=, or from another checkpoint",
                tensor=name, expected=str(expected), actual=str(actual),
            )  # fmt: skip
    return {name: found[taken.tied.get(name, name)] for name in getattr(taken.live, "live", taken.live)}
