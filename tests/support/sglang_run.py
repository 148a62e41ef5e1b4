"""What the tests of SGLang share: a trainer that publishes, a loopback server, and what drives it."""

import threading
import time
from contextlib import contextmanager

import httpx
from safetensors.torch import save_file

from deltawire import Publisher, Replica
from deltawire.engines.sglang.adapter import SglangEngine
from deltawire.engines.target import EngineTarget
from support.chains import fresh_url
from support.sglang_double import PROMPT, Double, Trainer


class Run:
    """A trainer that publishes, a server, and what drives it."""

    def __init__(self, tmp_path, *, ranks=1, url=None, **options):
        self.trainer, self.url = Trainer(), url or fresh_url()
        self.publisher = Publisher(self.url, self.trainer, run="demo", anchors=None)
        self.folder = tmp_path / "base"
        self.folder.mkdir()
        save_file(Trainer(seed=9).state_dict(), self.folder / "model.safetensors")
        self.server = Double(self.folder, ranks=ranks, **options)
        self.stage, self.mirror = tmp_path / "stage", tmp_path / "mirror"
        self.replica = None

    def publish(self, **options):
        self.publisher.publish(**options)
        self.publisher.flush()

    def step(self, **options):
        self.trainer.step()
        self.publish(**options)

    def attach(self, *, mode="patch", mirror=True, **options):
        if self.replica is not None:
            self.replica.close()
        engine = SglangEngine(self.server.url, mode=mode, shared_folder=self.stage, timeout=60, **options)
        self.replica = Replica(self.url, EngineTarget(engine, self.mirror if mirror else None))
        return self.replica

    def is_current(self, version):
        return (self.server.version, self.replica.version) == (str(version), version) and self.server.serves(
            self.trainer
        )

    def generate(self, number=3, tokens=PROMPT):
        body = {"input_ids": tokens, "max_new_tokens": number}
        answer = httpx.post(f"{self.server.url}/generate", json=body, timeout=60)
        assert answer.status_code == 200
        return answer.json()

    @contextmanager
    def traffic(self, number=3):
        """Requests one after the other from some threads; what they were answered."""
        answers, done = [], threading.Event()

        def ask():
            while not done.is_set():
                answers.append(self.generate(40))

        threads = [threading.Thread(target=ask) for _ in range(number)]
        for thread in threads:
            thread.start()
        try:
            while not self.server.running:
                time.sleep(0.001)
            yield answers
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def close(self):
        if self.replica is not None:
            self.replica.close()
        self.publisher.close()
        self.server.stop()
