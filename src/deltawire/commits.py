"""Makes versions exist, and finds out about those whose commit got no answer."""

from deltawire.errors import StoreUnavailable
from deltawire.lease import Lease
from deltawire.manifest import Manifest
from deltawire.runs import Run


class Commits:
    """The commits of one writer, who has taken the lease where the store needs one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lease = Lease(run)
        self._lease.take()
        self.unsettled: tuple[Manifest, bytes] | None = None
        """What was sent and may or may not exist."""

    def commit(self, manifest: Manifest) -> None:
        """Make a version exist. Nothing is known of it after StoreUnavailable with `uncertain`."""
        data = self._run.sign(manifest)
        self._lease.check()
        try:
            self._run.commit(data, manifest)
        except StoreUnavailable as error:
            if error.fields.get("uncertain"):
                self.unsettled = manifest, data
            raise

    def settle(self) -> Manifest | None:
        """Find out whether a commit whose answer was lost has happened, by sending the same bytes again."""
        if self.unsettled is None:
            return None
        manifest, data = self.unsettled
        self._lease.check()
        self._run.commit(data, manifest)
        self.unsettled = None
        return manifest
