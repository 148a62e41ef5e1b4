"""A process that has loaded vLLM and forks servers: loading takes longer than the rest of a start.

A server is what the `vllm` command makes of its arguments, and its own processes are forked, too. The command itself
runs where the guide of vLLM and the demo are tested.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.vllm_reference import ENVIRONMENT
from support.waiting import PATIENCE, eventually


class Nursery:
    """The process, as long as it is not closed."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__)], env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, question):
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process with vLLM ended with {self._process.wait()}")
        return json.loads(answer)

    def start(self, arguments, environment, log):
        """A server, which writes what it says to an open file."""
        name = getattr(log, "name", os.devnull)
        return Forked(self, self.ask({"arguments": arguments, "environment": environment, "log": str(name)}))

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


class Forked:
    """A server, with as much of `subprocess.Popen` as is needed."""

    def __init__(self, nursery, pid):
        self._nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, seconds=PATIENCE):
        eventually(lambda: self.poll() is not None, f"the end of process {self.pid}", seconds=seconds)

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)


def load():
    """What a server and its engine need, and nothing that a fork would break: no threads."""
    from vllm.utils import system_utils

    # Modules take this by its name when they are imported.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import deltawire.engines.vllm.worker  # noqa: F401

    # A signal to an engine is not one to its server, whose event loop it would wake.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def serve(asked):
    """What a forked process does, until it ends."""
    from vllm.entrypoints.cli.main import main

    os.setsid()
    with open(os.devnull) as nothing, open(asked["log"], "ab") as log:
        for fd, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file.fileno(), fd)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["vllm", *asked["arguments"]]
    sys.exit(main())


def run():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load()
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                serve(asked)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    run()
