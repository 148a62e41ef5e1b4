"""The page with sliders for `deltawire estimate`, served on this machine only; the numbers are computed here."""

import json
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from deltawire.estimate.bill import estimate
from deltawire.estimate.plan import Plan, density_of
from deltawire.estimate.prices import PRICES
from deltawire.estimate.report import head_of, table_of
from deltawire.pages.explain import STATIC, PageHandler

NUMBERS = {
    "weights": float, "steps_a_day": float, "sites": int, "replicas": int, "trainer_mbits": float, "site_mbits": float,
    "replica_mbits": float, "round_trip_ms": float, "poll_seconds": float, "joins_a_day": float,
}  # fmt: skip


def answer(query: str) -> dict[str, Any]:
    """The estimate for the numbers of a query, with the table that people see."""
    given = dict(parse_qsl(query, strict_parsing=True, max_num_fields=20))
    values: dict[str, Any] = {name: kind(given.pop(name)) for name, kind in NUMBERS.items() if name in given}
    prices, lr = PRICES[given.pop("store", "s3")], float(given.pop("lr", "1e-6"))
    if given:
        raise ValueError(f"there is no setting {min(given)}")
    data = estimate(Plan(density=density_of(lr), **values), prices, num_versions=3)
    header, rows = table_of(data)
    return data | {"head": head_of(data), "table": [header, *rows]}


class EstimateHandler(PageHandler):
    page, entry = STATIC / "estimate" / "index.html", "/estimate/"

    def send_head(self) -> Any:
        if urlsplit(self.path).path != f"{self.entry}data":
            return super().send_head()
        try:
            status, body = HTTPStatus.OK, answer(urlsplit(self.path).query)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            status, body = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return BytesIO(data)
