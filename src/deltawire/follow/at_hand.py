"""A checkpoint that a replica has at hand: where it is a version of the run, no anchor is fetched."""

from contextlib import suppress
from pathlib import Path

from deltawire.errors import BaseMismatch, FormatError, MismatchError, ObjectMissing
from deltawire.format.checkpoint import Checkpoint
from deltawire.run.manifest import Manifest, StoredHop
from deltawire.run.run import Run
from deltawire.tensors.digest import Digest, WeightVersion, digest
from deltawire.tensors.weights import untied_name


class AtHand:
    """A checkpoint on this machine, which is read when it is first needed."""

    def __init__(self, path: str | Path, threads: int | None) -> None:
        self.checkpoint, self._threads = Checkpoint(path), threads
        self._digest: Digest | None = None

    def version(self, run: Run, manifest: Manifest) -> WeightVersion:
        """Which version of the run it is, by its digest; BaseMismatch if it is none that leads to the one wanted."""
        if self._digest is None:
            self._digest = digest(self.checkpoint, tied=manifest.tied, threads=self._threads)
            if untied_name(self.checkpoint, manifest.tied) is None:
                self.checkpoint.leave_out(manifest.tied)  # some programs write tied weights twice
        hops = [*manifest.route, manifest.hop]
        # A run that has another anchor by now does not name its first version.
        with suppress(ObjectMissing, FormatError, MismatchError):
            hops.append(run.manifest(0).hop)
        found = recognised(run, self._digest, hops)
        if found is None:
            raise BaseMismatch(
                f"{self.checkpoint.path} is not a version of run {run.id} that leads to version {manifest.version}: "
                "pass the checkpoint that the run started from, or leave base out",
                path=str(self.checkpoint.path), version=manifest.version,
            )  # fmt: skip
        return found


def recognised(run: Run, found: Digest | None, hops: list[StoredHop]) -> WeightVersion | None:
    """The version that has this digest, of those that hops start from or lead to."""
    for hop in hops:
        if found is not None and found == hop.digest:
            return WeightVersion(run.id, hop.version, found)
        if found is not None and hop.base is not None and found == hop.base_digest:
            return WeightVersion(run.id, hop.base, found)
    return None
