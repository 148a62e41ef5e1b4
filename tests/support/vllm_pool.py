"""vLLM servers that tests share: a start takes longer than most tests."""

from contextlib import contextmanager

from support.vllm_nursery import Nursery
from support.vllm_server import EXTENSION, Vllm, make_model, save_model


class Pool:
    """One server for each way to start one, when it is first asked for.

    It has whatever weights the test before has left: each test follows a run of its own.
    """

    def __init__(self, folder):
        self._folder, self._servers = folder, {}
        # Also for the servers that a test has for itself.
        self.nursery = Nursery()

    @contextmanager
    def server(self, kind="dense", *, tied=False, tp=1, extension=EXTENSION):
        """A server in order. One that is not so afterwards is closed, and the next test gets another."""
        hop = (kind, tied, tp, extension)
        kept = False
        try:
            if hop not in self._servers:
                self._start(*hop)
            yield self._servers[hop]
            kept = self._servers[hop].is_in_order()
        finally:
            if not kept and hop in self._servers:
                self._servers.pop(hop).close()

    def _start(self, kind, tied, tp, extension):
        base = self._folder / f"{kind}-{tied}"
        if not base.exists():
            save_model(make_model(kind, tied=tied), base)
        server = Vllm(base, tp=tp, extension=extension, log=self._folder / "log", nursery=self.nursery)
        self._servers[kind, tied, tp, extension] = server
        server.wait()

    def close(self):
        for server in self._servers.values():
            server.close()
        self.nursery.close()
