"""Orders to `loader` in each tensor-parallel rank of an SGLang server.

SGLang hands a rank the tensor that was posted for it, and answers only whether that went well. So the tensor names a
file, and what each rank has to say is another:

    CALL.json        an order: what to do, and with what in each rank
    CALL-rankN.json  how that went in a rank, and how things are there
    rankN.json       how things are there, as of its last order
    rankN.alive      locked by the rank for as long as it lives
"""

import fcntl
import json
import pickle
import time
from base64 import b64encode
from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from deltawire.engines.server import Server
from deltawire.engines.sglang.releases import About, about
from deltawire.engines.shared_folder import SharedFolder, save_json
from deltawire.errors import DeltawireError, EngineRejected, EngineUnavailable

LOADER = "deltawire.engines.sglang.loader.load"
FLAG = f"--custom-weight-loader {LOADER}"
_POLL_SECONDS = 0.002


class Ranks:
    """The ranks of one server. Orders are given inside a session of weight updates, where it has those."""

    def __init__(self, server: Server, shared: SharedFolder, timeout: float) -> None:
        self._server, self._shared, self._timeout = server, shared, timeout
        self.number = 0

    def connect(self) -> About:
        """Find out how many there are. A server that does not know the loader would end at the first order."""
        info, server = self._server.get("/server_info", self._timeout), f"the server at {self._server.url}"
        found = about(info)
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise EngineRejected(f"{server} was not started with {FLAG}: restart it with that flag")
        for parallel in ("pp_size", "dp_size"):
            if info.get(parallel, 1) != 1:
                where = "weights can only be changed in place in tensor-parallel ranks; use mode 'disk'"
                raise EngineRejected(f"{server} has {parallel} {info[parallel]}: {where}")
        if info.get("enable_eplb"):
            raise EngineRejected(f"{server} moves experts between its ranks: start it without --enable-eplb")
        self.number = int(info.get("tp_size", 1))
        return found

    def statuses(self) -> list[dict[str, Any]] | None:
        """How things are in each rank, where all are known and alive. Asks nothing of the server."""
        found = []
        for rank in range(self.number):
            try:
                found.append(json.loads(self._shared.path(f"rank{rank}.json").read_text()))
            except FileNotFoundError:
                return None
            if not self._is_alive(rank):
                return None
        return found or None

    def order(self, name: str, each: Sequence[Any] | None = None, **shared: Any) -> list[dict[str, Any]]:
        """Have all ranks do something, each with arguments of its own, or all with the same; their answers."""
        return self.answers(self.send(name, each, **shared), 0)

    def send(self, name: str, each: Sequence[Any] | None = None, **shared: Any) -> str:
        """The same for an order that ranks go on with when this returns; its call."""
        call = token_hex(8)
        save_json(self._shared.path(f"{call}.json"), {"name": name, "arguments": each or [shared] * self.number})
        body = {
            "serialized_named_tensors": [self._tensor(call, rank) for rank in range(self.number)],
            "load_format": LOADER,
            "flush_cache": False,
            # Not for a draft model: what it is called before 0.5.21, and from then on.
            "disable_draft_model": True,
            "selector": "target",
        }
        try:
            self._server.post("/update_weights_from_tensor", body, self._timeout)
        except DeltawireError:
            self._forget(call)
            raise
        return call

    def answers(self, call: str, seconds: float | None = None) -> list[dict[str, Any]]:
        deadline = time.monotonic() + (self._timeout if seconds is None else seconds)
        paths = [self._shared.path(f"{call}-rank{rank}.json") for rank in range(self.number)]
        try:
            while True:
                late = time.monotonic() > deadline
                missing = [rank for rank, path in enumerate(paths) if not path.exists()]
                if not missing or late:
                    break
                if not all(self._is_alive(rank) for rank in missing):
                    raise EngineUnavailable(f"{self._server.url} ended before it answered", url=self._server.url)
                time.sleep(_POLL_SECONDS)
            error = {"message": f"it did not answer: check that it can read {self._shared.folder}", "tensor": None}
            nothing = {"state": None, "partial": None, "error": error}
            return [
                {"rank": rank, **nothing} if rank in missing else json.loads(path.read_text())
                for rank, path in enumerate(paths)
            ]
        finally:
            self._forget(call)

    def _forget(self, call: str) -> None:
        for left in self._shared.folder.glob(f"{call}*"):
            left.unlink(missing_ok=True)

    def _tensor(self, call: str, rank: int) -> str:
        order = json.dumps({"folder": str(self._shared.folder.absolute()), "call": call, "rank": rank})
        return b64encode(pickled("deltawire", order.encode())).decode()

    def _is_alive(self, rank: int) -> bool:
        try:
            with self._shared.path(f"rank{rank}.alive").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False


def pickled(name: str, data: bytes) -> bytes:
    """`[(name, torch.tensor([...]))]`, as pickle would write it: the agent needs no torch for that, and SGLang's
    unpickler has to allow nothing but `torch.tensor`.
    """
    parts = (pickle.dumps(part, 2)[2:-1] for part in (name, list(data)))
    return b"\x80\x02]" + next(parts) + b"ctorch\ntensor\n" + next(parts) + b"\x85R\x86a."
