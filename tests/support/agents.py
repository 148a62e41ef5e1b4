"""What the tests of agents share: a trainer that publishes, and an engine that can be away."""

import numpy as np
import torch

from deltawire import Publisher
from deltawire.engines.torch import TorchEngine
from deltawire.errors import EngineUnavailable
from support.waiting import PATIENCE


def model():
    """The weights that a server starts with: those of version 0."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20)).bfloat16()


def bits(module):
    return {name: tensor.view(torch.int16).numpy().tobytes() for name, tensor in module.state_dict().items()}


class Trainer:
    """Publishes steps of a model."""

    def __init__(self, url, **options):
        self.model, self.rng = model(), np.random.default_rng(0)
        self.publisher = Publisher(url, self.model, **options)
        self.publisher.publish().wait(PATIENCE)

    def step(self):
        for tensor in self.model.state_dict().values():
            flat = tensor.view(torch.int16).view(-1)
            flat[self.rng.choice(len(flat), 3, replace=False)] += 1
        return self.publisher.publish().wait(PATIENCE).version


class Server:
    """An engine that can be away, fail, and be started anew with the weights it had at first."""

    kind, address = "torch", "a server"

    def __init__(self):
        self.start()

    def start(self):
        self.failing = {}
        self.model = model()
        self.engine = TorchEngine(self.model, threads=1)

    def go_away(self):
        self.failing = dict.fromkeys(
            ("status", "bind", "digest", "stage"), EngineUnavailable("a server does not answer")
        )

    def __getattr__(self, name):
        if error := self.failing.get(name):

            def fail(*_):
                raise error

            return fail
        return getattr(self.engine, name)
