"""What servers that are driven over HTTP have in common: the connection, the shared folder, the layout of tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from deltawire.engines.engine import Engine, EngineChange, EngineDelta
from deltawire.engines.layout import Layout, Piece
from deltawire.engines.server import Server
from deltawire.engines.shared_folder import SharedFolder
from deltawire.errors import EngineBroken, EngineRejected
from deltawire.redact import redacted
from deltawire.tensors.digest import Digest
from deltawire.tensors.weights import Specs

Answers = Sequence[Mapping[str, Any]]
"""One for each process of a server, in order of ranks: `rank`, `error`, `result` and what `LiveModel.status` has."""


class HttpEngine(Engine):
    """An engine in a server on this machine.

    Args:
        url: Where the server listens, such as http://127.0.0.1:8000.
        shared_folder: A folder that agent and server both see; changes are handed over in it. By default in shared
            memory.
        running_requests: What becomes of requests that run during an update. `recompute` computes their context again
            with the new weights, `keep` goes on from what the old weights computed, prefix cache included, `abort`
            ends them.
        api_key: Sent as a bearer token.
        timeout: Seconds that a request may take.
        load_timeout: The same for requests that read or load all weights.
    """

    pauses: ClassVar[Mapping[str, Any]]
    """How the server is asked to pause, for each choice of `running_requests`."""

    def __init__(
        self,
        url: str,
        *,
        shared_folder: str | Path | None = None,
        running_requests: str = "recompute",
        api_key: str | None = None,
        timeout: float = 60.0,
        load_timeout: float = 3600.0,
    ) -> None:
        if running_requests not in self.pauses:
            raise ValueError(f"running_requests must be one of {', '.join(self.pauses)}, not {running_requests!r}")
        self.address = redacted(url.rstrip("/"))
        self._server = Server(url.rstrip("/"), api_key, timeout)
        self._shared = SharedFolder(shared_folder, self.address)
        self._running_requests, self._load_timeout = running_requests, load_timeout
        self._layout: Layout | None = None
        self._token: str | None = None
        """Names the change that is staged."""

    @property
    def silent_since(self) -> float | None:
        """Since when, by `time.monotonic`, a server that has never answered is waited for, if it is."""
        return self._server.silent_since

    def close(self) -> None:
        self._server.close()
        self._shared.close()

    @property
    def _bound(self) -> Layout:
        if self._layout is None:
            raise EngineRejected("the server's tensors are not known yet: call bind first")
        return self._layout

    @property
    def left_out(self) -> Collection[str]:
        return () if self._layout is None else self._layout.left_out

    def _set_layout(
        self, specs: Specs, pieces: Iterable[Iterable[Sequence[Any]]], left_out: Collection[str] = ()
    ) -> None:
        self._layout = Layout(specs, [[Piece.from_list(each) for each in own] for own in pieces], left_out)

    def _measured(self, answers: Answers) -> Digest:
        refuse(answers, "the server's weights could not be read")
        # Where processes differ in what they should share, these are the weights of no version.
        return self._total(answers) if self._bound.alike(each["result"] for each in answers) else Digest()

    def _total(self, answers: Answers, field: str = "partial") -> Digest:
        return self._bound.total(Digest.parse(each[field]) for each in answers if each[field])

    def _take_token(self, change: EngineChange | EngineDelta) -> str:
        token, self._token = self._token, None
        if token is None:
            raise EngineRejected(f"the change to version {change.state.version} is not staged")
        return token

    def _problem(self, answers: Answers, expected: Digest) -> str | None:
        """Why the processes do not hold the weights that they should have written, if they do not."""
        for each in answers:
            if each["error"]:
                return f"rank {each['rank']}: {each['error']['message']}"
        found = self._total(answers)
        return None if found == expected else f"the weights have digest {found}, not {expected}"

    def _broken(self, problem: str) -> EngineBroken:
        return EngineBroken(f"{problem}; {self.address} stays paused: restart it", url=self.address)


def spec_fields(specs: Specs) -> dict[str, Any]:
    """Dtypes and shapes as JSON has them."""
    return {name: [dtype, list(shape)] for name, (dtype, shape) in specs.items()}


def refuse(answers: Answers, what: str) -> None:
    # Some have failed only because another one has.
    for each in sorted(answers, key=lambda each: (each["error"] or {}).get("kind") == "Elsewhere"):
        if each["error"]:
            tensor = each["error"]["tensor"]
            raise EngineRejected(
                f"{what}: rank {each['rank']}: {each['error']['message']}", **({"tensor": tensor} if tensor else {})
            )
