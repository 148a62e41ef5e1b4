"""Torch modules as sources: cast as torch casts, tied weights once, plain names, and nothing missed."""

import numpy as np
import pytest
import torch

from deltawire import Publisher, Replica
from deltawire.errors import ShapeMismatch, UnknownParameter
from deltawire.sources import module_source, plain_name
from support.chains import fresh_url


class Model(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(50, width)
        self.layer = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embed(tokens))))


def published_bits(model, dtype=torch.bfloat16):
    """What must arrive: torch's own cast of every parameter."""
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: value.detach().to(dtype).view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
            for name, value in named.items()}  # fmt: skip


def same(replica, expected):
    weights = replica.target.weights()
    return weights.keys() == expected.keys() and all(
        np.array_equal(weights[name].bits, bits) for name, bits in expected.items()
    )


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("layers.0.q.weight", "layers.0.q.weight"),
        ("module.layers.0.q.weight", "layers.0.q.weight"),
        ("module.module.x", "x"),
        ("_orig_mod.layers.0.q.weight", "layers.0.q.weight"),
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.q.weight", "layers.0.q.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.q.weight", "layers.0.q.weight"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.model.layers.0.q_proj.lora_A.default.weight", "model.layers.0.q_proj.lora_A.default.weight"),
        ("vision.module.weight", "vision.module.weight"),
    ],
)
def test_plain_names(wrapped, plain):
    assert plain_name(wrapped) == plain


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_every_published_version_is_torchs_own_cast(kind, master):
    torch.manual_seed(0)
    model, url, rng = Model().to(master), fresh_url(), np.random.default_rng(0)
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    }[kind]()
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        for number in range(12):
            model(torch.arange(50)).float().square().mean().backward()
            if number % 2:  # gradients of two steps
                optimizer.step()
                optimizer.zero_grad()
            if rng.random() < 0.6:
                expected = published_bits(model)
                publisher.publish().wait(30)
                replica.pull()
                assert same(replica, expected)
        assert publisher.run.manifest(0).tied == {"head.weight": "embed.weight"}


def test_attach_publishes_after_steps_that_were_taken():
    torch.manual_seed(0)
    model, url = Model(), fresh_url()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Publisher(url, model, queue_size=9) as publisher:
        handle = publisher.attach(optimizer, every=2)
        for number in range(7):
            loss = model(torch.arange(50)).square().mean() * (float("inf") if number == 2 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # skips the one that overflows
            scaler.update()
            optimizer.zero_grad()
        publisher.flush()
        assert [publisher.run.manifest(version).step for version in publisher.run.versions()] == [2, 4, 6]
        handle.remove()
        optimizer.step()
        assert publisher.run.latest() == 2
        with pytest.raises(ValueError, match="every"):
            publisher.attach(optimizer, every=0)


def test_odd_bits_are_not_missed():
    """-0.0, NaN, infinities and subnormals, where a comparison of numbers would see nothing."""
    model = torch.nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight[0] = torch.tensor([0.0, -0.0, float("nan"), 1.0, float("inf"), 1e-40, -1e-40, 1e38])
    url = fresh_url()
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(30)
        before = published_bits(model)["weight"]
        with torch.no_grad():
            model.weight[0, 0], model.weight[0, 1], model.weight[0, 5] = -0.0, 0.0, 0.0
            model.weight.view(torch.int32)[0, 2] ^= -(2**31)  # the sign of a NaN
        changed = np.flatnonzero(before != published_bits(model)["weight"])
        assert {0, 1, 5} <= set(changed)
        assert publisher.publish().wait(30).stats["num_changed"] == len(changed)
        replica.pull()
        assert same(replica, published_bits(model))


def test_frozen_parameters_are_in_the_anchor_and_not_compared():
    model, url = Model(), fresh_url()
    model.layer.weight.requires_grad_(False)
    before = model.layer.weight.detach().clone()
    for frozen in (False, True):
        url = fresh_url()
        with Publisher(url, module_source(model, frozen=frozen)) as publisher, Replica(url, {}) as replica:
            publisher.publish().wait(30)
            with torch.no_grad():
                model.layer.weight.add_(1.0)
            assert (publisher.publish().wait(30).stats["num_changed"] > 0) == frozen
            model.layer.weight.requires_grad_(True)  # from now on it trains
            publisher.publish().wait(30)
            replica.pull()
            assert same(replica, published_bits(model))
            with torch.no_grad():
                model.layer.weight.copy_(before)
            model.layer.weight.requires_grad_(False)


def test_buffers_if_wanted_and_other_dtypes():
    model = Model()
    model.register_buffer("steps", torch.arange(5))
    weights = module_source(model, buffers=True)()
    assert {"scale", "steps"} <= set(weights)
    assert "cache" not in weights
    assert weights.form("steps") == ("I64", (5,))
    assert set(module_source(model)()) == {"embed.weight", "layer.weight", "layer.bias"}
    assert module_source(model, dtype="F32")().form("layer.weight") == ("F32", (16, 16))
    with pytest.raises(ValueError, match="published as"):
        module_source(model, dtype="I8")
    with pytest.raises(ValueError, match="one dtype"):
        Publisher(fresh_url(), model, dtype={"a": "BF16"})


def test_parameters_that_come_go_or_change():
    model, url = Model(), fresh_url()
    model.empty = torch.nn.Parameter(torch.zeros(0, 4))
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(30)
        model.extra = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(UnknownParameter, match="extra"):
            publisher.publish()
        publisher.publish(anchor=True).wait(30)
        del model.extra
        with pytest.raises(UnknownParameter, match="extra"):
            publisher.publish()
        model.extra = torch.nn.Parameter(torch.ones(4))
        with pytest.raises(ShapeMismatch, match="extra"):
            publisher.publish()
        publisher.publish(anchor=True).wait(30)
        replica.pull()
        assert same(replica, published_bits(model))
        model.bfloat16()  # published as before, so nothing has changed
        assert publisher.publish().wait(30).stats["num_changed"] == 0


def test_non_contiguous_parameters():
    model, url = torch.nn.Linear(6, 4, bias=False), fresh_url()
    model.weight = torch.nn.Parameter(torch.randn(6, 4).t())
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(30)
        with torch.no_grad():
            model.weight[2, 3] += 1
        publisher.publish().wait(30)
        replica.pull()
        assert same(replica, {"weight": model.weight.detach().contiguous().to(torch.bfloat16).view(torch.int16)
                              .numpy().view(np.uint16).reshape(-1)})  # fmt: skip


def test_wrapped_modules_are_published_under_their_own_names():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert set(module_source(compiled)()) == set(module_source(model)())
    assert set(module_source(torch.nn.DataParallel(model))()) == set(module_source(model)())
