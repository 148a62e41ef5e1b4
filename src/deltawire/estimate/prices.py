"""What stores charge. List prices in US dollars, without discounts, free tiers and taxes; yours may differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GB, TB = 1e9, 1e12
DAYS_A_MONTH = 30
MOST_PRICE = 1e9


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a store.

    Attributes:
        storage: For a GB and a month.
        put_1000: For 1000 writes, or listings.
        get_1000: For 1000 reads.
        egress: For a GB that leaves the store: pairs of where a tier starts, in TB a month, and its price.
    """

    storage: float
    put_1000: float
    get_1000: float
    egress: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        for price in (self.storage, self.put_1000, self.get_1000, *(price for _, price in self.egress)):
            if not 0 <= price <= MOST_PRICE:
                raise ValueError(f"a price must be between 0 and {MOST_PRICE:g} US dollars, not {price:g}")

    def requests(self, num_puts: float, num_gets: float) -> float:
        return (num_puts * self.put_1000 + num_gets * self.get_1000) / 1000

    def egress_a_day(self, bytes_a_day: float) -> float:
        """What a day costs, if every day of the month is like it."""
        month, spent = bytes_a_day * DAYS_A_MONTH / TB, 0.0
        for (start, price), (end, _) in pairwise([*self.egress, (float("inf"), 0.0)]):
            spent += max(min(month, end) - start, 0) * TB / GB * price
        return spent / DAYS_A_MONTH

    def storage_a_day(self, num_bytes: float) -> float:
        return num_bytes / GB * self.storage / DAYS_A_MONTH


PRICES = {
    "s3": Prices(0.023, 0.005, 0.0004, [(0, 0.09), (10, 0.085), (50, 0.07), (150, 0.05)]),
    "gcs": Prices(0.020, 0.005, 0.0004, [(0, 0.12)]),
    "r2": Prices(0.015, 0.0045, 0.00036, [(0, 0.0)]),
    "own": Prices(0.0, 0.0, 0.0, [(0, 0.0)]),
}
