"""The result of a pull."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pull:
    """The result of one pull.

    Attributes:
        version: The version that the weights are at now.
        base: The version they were at before, or that of the checkpoint at hand; None if an anchor was loaded.
        num_bytes: Bytes downloaded.
        num_objects: Objects downloaded.
        num_changed: Changed elements, summed over the deltas of the route.
        anchor: Whether the route started with an anchor.
        fetch_seconds: Time to download.
        decode_seconds: Time to decode and check.
        apply_seconds: Time to write to the target.
        served_seconds: Time from the version's publication to the end of the pull, by the clocks of both machines; None
            if nothing had to be fetched.
    """

    version: int
    base: int | None
    num_bytes: int
    num_objects: int
    num_changed: int
    anchor: bool
    fetch_seconds: float
    decode_seconds: float
    apply_seconds: float
    served_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """The total time of the pull."""
        return self.fetch_seconds + self.decode_seconds + self.apply_seconds
