"""Whether a server computes from the parameters that updates are written to: if one changes, answers must change.

A server may keep copies of parameters, made at startup or at the first request, that are not visible in the parameters
themselves. So nothing is assumed: one parameter after the other is disturbed, on each worker, a request is sent, and
the bits are restored. For experts, all tokens are steered to one of them at a time.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

ALIVE, DEAD, UNTOLD = "alive", "dead", "unclear"
# How strongly a parameter is disturbed, in units of its own size. More where little has no effect: an attention sink
# must come near the largest score. Both ways: one token less in the attention to many may be lost in rounding.
STRENGTHS = (2.0, 50.0, 1000.0)
BOTH_WAYS = (*STRENGTHS, 30_000.0, *(-each for each in STRENGTHS))
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one worker. A parameter with experts has one part per expert."""

    rank: int
    name: str
    num_parts: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What to check: the parameters, and everything that the result depends on."""

    about: dict[str, Any]
    """Model, flags and versions."""
    parameters: Sequence[Parameter]
    block_size: int
    """How many tokens of a prompt are cached together for later requests; 0 if they are not cached."""


class Probed(Protocol):
    """A server without other traffic."""

    def subject(self) -> Subject: ...

    def disturb(self, rank: int, name: str, part: int | None, strength: float) -> None:
        """Change a parameter of a worker, or the part of one expert."""

    def steer(self, name: str, part: int, seed: int) -> bool:
        """Route many tokens to an expert of a layer, on all workers. False if that is not possible."""

    def restore(self) -> None:
        """Restore all bits."""

    def ask(self, prompt: Sequence[int], salt: str, *, decodes: bool) -> Any:
        """The server's answer to a prompt, for comparison. Requests with equal salt share their context.

        With `decodes` it is about the next token alone, otherwise about each token of the prompt.
        """


@dataclass(frozen=True, slots=True)
class Found:
    """Whether answers depend on a parameter, in prefill and in decode."""

    rank: int
    name: str
    part: int | None
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The result, for all parameters."""

    about: dict[str, Any]
    found: Sequence[Found]
    proven: float
    """When it was proven, in seconds since 1970."""

    def count(self, state: str) -> int:
        return sum(state in (each.prefill, each.decode) for each in self.found)

    @property
    def holds(self) -> bool:
        return not self.count(DEAD)


def prove(server: Probed, progress: Callable[[str, int], None] | None = None) -> Proof:
    """Disturb each parameter of a server without other traffic, and check whether its answers change."""
    subject = server.subject()
    prover = _Prover(server, subject)
    found = []
    for each in subject.parameters:
        for part in range(each.num_parts) if each.num_parts else [None]:
            found.append(prover.parameter(each, part))
            if progress is not None:
                progress(each.name, 1)
    return Proof(subject.about, found, time.time())


class _Prover:
    def __init__(self, server: Probed, subject: Subject) -> None:
        self._server = server
        # Without kept context the next token cannot be computed apart from the prompt.
        self._num_tokens = subject.block_size + 1 if subject.block_size else 24
        self._salts = 0
        self._plain: dict[tuple[bool, int], tuple[list[int], str, Any]] = {}

    def parameter(self, parameter: Parameter, part: int | None) -> Found:
        prefill, decode = (self._state(parameter, part, decodes) for decodes in (False, True))
        return Found(parameter.rank, parameter.name, part, prefill, decode)

    def _state(self, parameter: Parameter, part: int | None, decodes: bool) -> str:
        """Answers must differ from those before; an expert that no token reached says nothing."""
        server, name, state = self._server, parameter.name, DEAD if part is None else UNTOLD
        for seed in SEEDS:
            for strength in STRENGTHS if part is not None else BOTH_WAYS:
                try:
                    other = None
                    if part is not None:
                        if not server.steer(name, (part + 1) % parameter.num_parts, seed):
                            return UNTOLD
                        other = self._before(decodes, seed, steered=True)[2]
                        server.restore()
                        server.steer(name, part, seed)
                    prompt, salt, before = self._before(decodes, seed, steered=part is not None)
                    if before is None:
                        return UNTOLD
                    server.disturb(parameter.rank, name, part, strength)
                    if server.ask(prompt, salt if decodes else self._salt(), decodes=decodes) != before:
                        return ALIVE
                    if part is not None and other != before:
                        state = DEAD
                finally:
                    server.restore()
        return state

    def _before(self, decodes: bool, seed: int, *, steered: bool) -> tuple[list[int], str, Any]:
        """A prompt, the salt under which its context is kept, and the answer as things are; None if it varies."""
        if not steered and (decodes, seed) in self._plain:
            return self._plain[decodes, seed]
        prompt, salt = [2 + (7 * seed + 11 * i + i * i) % 97 for i in range(self._num_tokens)], self._salt()
        answers = [
            self._server.ask(prompt, salt if decodes else self._salt(), decodes=decodes)
            for _ in range(3 if decodes else 2)
        ]
        found = prompt, salt, answers[-1] if answers[-1] == answers[-2] else None
        if not steered:
            self._plain[decodes, seed] = found
        return found

    def _salt(self) -> str:
        self._salts += 1
        return f"deltawire-{time.time_ns()}-{self._salts}"


def _path(about: dict[str, Any]) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltawire" / "proofs"
    return folder / f"{sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]}.json"


def remember(proof: Proof) -> Path:
    """Keep a proof for this model, with these flags and versions."""
    path = _path(proof.about)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(proof)))
    return path


def remembered(about: dict[str, Any]) -> Proof | None:
    """What was proven before, if nothing has changed since."""
    try:
        fields = json.loads(_path(about).read_text())
        found = [Found(**each) for each in fields["found"]]
        return Proof(about, found, float(fields["proven"])) if fields["about"] == about else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
