"""An inference server's HTTP interface: JSON in, JSON out, and errors with a name."""

import time
from typing import Any

from deltawire.errors import EngineRejected, EngineUnavailable, MissingDependency
from deltawire.redact import redacted


class Server:
    """Requests to one server, over connections that are kept."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingDependency("engines over HTTP need more packages: pip install 'deltawire[agent]'") from None
        self._httpx = httpx
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has characters that are not allowed in an HTTP header, such as a newline")
        self.url, self._timeout = redacted(url), timeout
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"{self.url!r} is not a server's URL, such as http://127.0.0.1:8000")
        if address.path.endswith("/v1"):
            raise ValueError(f"{self.url!r} is where the server's API for clients is: leave out /v1")
        self.silent_since: float | None = None
        """Since when a request waits, by `time.monotonic`, if no answer has ever come: nothing has begun there."""
        self._is_heard = False
        self._client = httpx.Client(base_url=address, headers=headers, trust_env=False)

    def get(self, path: str, timeout: float | None = None) -> Any:
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        return self._request("POST", path, body, timeout)

    def trigger(self, path: str, body: Any = None) -> None:
        """POST a request whose response has no content that matters."""
        self._send("POST", path, body, None)

    def _request(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        answer = self._send(method, path, body, timeout)
        try:
            found = answer.json() if answer.content else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EngineUnavailable(
                f"{self.url} answered {path} with something other than a JSON object: check its URL"
            )
        return found

    def _send(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        self.silent_since = None if self._is_heard else time.monotonic()
        try:
            answer = self._client.request(method, path, json=body, timeout=timeout or self._timeout)
            self._is_heard = True
        except self._httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{self.url} does not answer {path}: {str(error) or type(error).__name__}", url=self.url
            ) from error
        finally:
            self.silent_since = None
        if answer.status_code == 404:
            raise EngineRejected(
                f"{self.url} has no {path}: check that it is the right kind of server, started as in the guide"
            )
        if answer.status_code in (502, 503, 504):
            raise EngineUnavailable(f"{self.url} is not ready: {answer.status_code}", url=self.url)
        if answer.is_error:
            said = f"{self.url} refused {path}: {answer.status_code} {answer.text[:500]}"
            raise EngineRejected(said, status=answer.status_code)
        return answer

    def close(self) -> None:
        self._client.close()
