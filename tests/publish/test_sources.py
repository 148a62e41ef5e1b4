"""Torch modules as sources: cast as torch casts, tied weights once, plain names, and nothing missed."""

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from deltawire import Publisher, Replica
from deltawire.errors import ShapeMismatch, SnapshotMismatch, UnknownParameter
from deltawire.publish.sources import module_source
from deltawire.tensors.names import plain_name
from support.chains import fresh_url
from support.waiting import PATIENCE


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
    """What must arrive: torch's own cast of every parameter, and every persistent buffer as it is."""
    named = {
        plain_name(name): parameter.detach().to(dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    named |= {plain_name(name): buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    return {name: np.frombuffer(value.contiguous().numpy(force=True).tobytes() if value.dtype != torch.bfloat16
                                else value.contiguous().view(torch.int16).numpy().tobytes(), unsigned[value.itemsize])
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
                publisher.publish().wait(PATIENCE)
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


def test_attach_to_an_optimizer_of_accelerate():
    """Its wrapper has the method for hooks, which fails, and counts no step while gradients accumulate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    model, url = torch.nn.Linear(4, 4), fresh_url()
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with Publisher(url, wrapped, queue_size=9) as publisher:
            handle = publisher.attach(optimizer)
            for number in range(6):
                if number == 4:
                    handle.remove()
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(torch.ones(2, 4)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            publisher.flush()
            assert publisher.version == 1
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)


def test_attach_to_what_has_no_hooks():
    with (
        Publisher(fresh_url(), torch.nn.Linear(2, 2)) as publisher,
        pytest.raises(TypeError, match="Linear has no hooks for steps: pass an optimizer of torch"),
    ):
        publisher.attach(torch.nn.Linear(2, 2))


def test_odd_bits_are_not_missed():
    """-0.0, NaN, infinities and subnormals, where a comparison of numbers would see nothing."""
    model = torch.nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight[0] = torch.tensor([0.0, -0.0, float("nan"), 1.0, float("inf"), 1e-40, -1e-40, 1e38])
    url = fresh_url()
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(PATIENCE)
        before = published_bits(model)["weight"]
        with torch.no_grad():
            model.weight[0, 0], model.weight[0, 1], model.weight[0, 5] = -0.0, 0.0, 0.0
            model.weight.view(torch.int32)[0, 2] ^= -(2**31)  # the sign of a NaN
        changed = np.flatnonzero(before != published_bits(model)["weight"])
        assert {0, 1, 5} <= set(changed)
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == len(changed)
        replica.pull()
        assert same(replica, published_bits(model))


def test_parameters_that_do_not_train_are_compared_all_the_same():
    """A checkpoint that is loaded, an EMA copy, another parameter: also by operations that torch does not count."""
    model, url = Model(), fresh_url()
    model.layer.weight.requires_grad_(False)
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish()
        for change in (
            lambda: model.layer.weight.data.add_(1.0),
            lambda: model.layer.weight.detach().numpy().__imul__(0.5),
            lambda: model.load_state_dict({**model.state_dict(), "layer.weight": torch.randn(16, 16)}),
            lambda: setattr(model.layer, "weight", torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)),
        ):
            change()
            assert publisher.publish().wait(PATIENCE).stats["num_changed"] > 0
            replica.pull()
            assert same(replica, published_bits(model))


def test_what_is_promised_to_be_frozen_is_in_anchors_and_not_compared():
    model, url = Model(), fresh_url()
    with Publisher(url, model, frozen=["embed.*", "layer.weight"], check_share=0) as publisher:
        publisher.publish().wait(PATIENCE)
        with torch.no_grad():
            model.layer.weight.add_(1.0)
            model.layer.bias.add_(1.0)
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 16
    with Replica(url, {}) as replica:
        replica.pull()
        assert replica.target.weights()["embed.weight"].bits.any()
    for bad, error in (("layer.*", TypeError), (["layr.*"], ValueError), ([3], TypeError)):
        with pytest.raises(error, match="frozen"):
            Publisher(fresh_url(), model, frozen=bad)
    with pytest.raises(ValueError, match=r"no tensor name matches 'module\.\*': names are such as 'scale'"):
        Publisher(fresh_url(), torch.nn.DataParallel(model), frozen=["module.*"])


def test_a_broken_promise_stops_the_publisher():
    model = Model()
    publisher = Publisher(fresh_url(), model, frozen=["layer.*"], check_share=1)
    publisher.publish().wait(PATIENCE)
    with torch.no_grad():
        model.layer.bias.add_(1.0)
    with pytest.raises(SnapshotMismatch, match="frozen") as caught:
        publisher.publish().wait(PATIENCE)
    assert caught.value.tensor == "layer.bias"
    with pytest.raises(SnapshotMismatch):
        publisher.publish()
    publisher.close()
    assert publisher.run.latest() == 0


def test_buffers_are_published_as_they_are():
    model, url = Model(), fresh_url()
    model.register_buffer("steps", torch.arange(5))
    weights = module_source(model)()
    assert set(weights) == {"embed.weight", "layer.weight", "layer.bias", "scale", "steps"}  # not the cache
    assert weights.spec("steps") == ("I64", (5,))
    assert weights.spec("scale") == ("F32", (3,))
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish()
        model.scale.mul_(3)
        model.steps.add_(1)
        publisher.publish().wait(PATIENCE)
        replica.pull()
        assert same(replica, published_bits(model))


def test_dtypes_of_a_module():
    model = Model()
    assert module_source(model, dtype="F32")().spec("layer.weight") == ("F32", (16, 16))
    mixed = module_source(model, dtype={"layer.weight": "F32", "scale": "BF16"})()
    assert [mixed.spec(name)[0] for name in ("embed.weight", "layer.weight", "scale")] == ["BF16", "F32", "BF16"]
    with pytest.raises(ValueError, match="published as"):
        module_source(model, dtype="I8")()
    for name, wrapped in (("a", model), ("module.layer.weight", torch.nn.DataParallel(model))):
        message = f"no floating-point tensor called {name}: names are such as 'scale'"
        with pytest.raises(ValueError, match=message):
            Publisher(fresh_url(), wrapped, dtype={name: "BF16"})


def test_one_dtype_for_tensors_of_which_some_cannot_be_cast():
    """As of a `state_dict` with counts. The error names these, and says what to do."""
    tensors = {"a": torch.ones(3), "b": torch.ones(3).bfloat16(), "steps": torch.arange(3)}
    with (
        Publisher(fresh_url(), tensors, dtype="BF16") as publisher,
        pytest.raises(ValueError, match=r"steps: torch.int64 is not cast to BF16: pass dtype= as a mapping"),
    ):
        publisher.publish()
    dtypes = {"a": "BF16", "b": "BF16", "steps": "I64"}
    with Publisher(url := fresh_url(), tensors, dtype=dtypes) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(PATIENCE)
        replica.pull()
        ones = torch.ones(3).bfloat16().view(torch.uint16).numpy()
        assert same(replica, {"a": ones, "b": ones, "steps": np.arange(3, dtype=np.uint64)})


def test_a_dtype_for_a_tensor_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="the weights have no tensor called b"):
        Publisher(fresh_url(), {"a": np.zeros(3, np.uint16)}, dtype={"a": "BF16", "b": "BF16"})


def test_elements_in_two_dtypes_are_two_tensors():
    model, url = torch.nn.Linear(4, 4, bias=False), fresh_url()
    model.register_buffer("exact", model.weight.detach())
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(PATIENCE)
        replica.pull()
        assert same(replica, published_bits(model))


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_quantized_modules_are_refused_by_name():
    linear = torch.nn.Sequential(torch.nn.Linear(4, 4))
    dynamic = torch.ao.quantization.quantize_dynamic(linear)
    codes = torch.nn.Module()
    codes.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    codes.scale = torch.nn.Parameter(torch.ones(4))
    for module in (dynamic, codes):
        with pytest.raises(TypeError, match="quantized"):
            Publisher(fresh_url(), module)
    with pytest.raises(TypeError, match="TwoTensor"):
        Publisher(fresh_url(), {"a": TwoTensor(torch.zeros(2), torch.zeros(2))}).publish()
    url = fresh_url()
    with Publisher(url, codes.state_dict) as publisher:
        publisher.publish()
    with Replica(url, {}) as replica:
        replica.pull()
        assert replica.target.weights().spec("scale") == ("F32", (4,))


def test_nothing_to_publish_is_an_error(tmp_path):
    empty, meta = torch.nn.ReLU(), torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="no tensors"):
        Publisher(fresh_url(), empty)
    with pytest.raises(ValueError, match="meta device"):
        Publisher(fresh_url(), meta)
    for nothing in ({}, dict):
        with pytest.raises(ValueError, match="no tensors"):
            Publisher(tmp_path / "run", nothing)
    assert not list(tmp_path.rglob("*.json")), "no run without versions"
    weights = {"w": np.zeros(3, np.float32)}
    with Publisher(fresh_url(), lambda: weights) as publisher:
        weights = {}
        with pytest.raises(ValueError, match="no tensors"):
            publisher.publish()


def test_names_that_fall_together_without_their_wrappers():
    module = torch.nn.Module()
    module.register_module("_orig_mod", torch.nn.Linear(2, 2))
    module.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="two tensors of the module are called weight"):
        Publisher(fresh_url(), module)


def test_parameters_that_come_go_or_change():
    model, url = Model(), fresh_url()
    model.empty = torch.nn.Parameter(torch.zeros(0, 4))
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(PATIENCE)
        model.extra = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(UnknownParameter, match="extra"):
            publisher.publish()
        publisher.publish(anchor=True).wait(PATIENCE)
        del model.extra
        with pytest.raises(UnknownParameter, match="extra"):
            publisher.publish()
        model.extra = torch.nn.Parameter(torch.ones(4))
        with pytest.raises(ShapeMismatch, match="extra"):
            publisher.publish()
        publisher.publish(anchor=True).wait(PATIENCE)
        replica.pull()
        assert same(replica, published_bits(model))
        model.embed.bfloat16()  # published as before, so nothing has changed
        model.layer.bfloat16()
        assert publisher.publish().wait(PATIENCE).stats["num_changed"] == 0


def test_non_contiguous_parameters():
    model, url = torch.nn.Linear(6, 4, bias=False), fresh_url()
    model.weight = torch.nn.Parameter(torch.randn(6, 4).t())
    with Publisher(url, model) as publisher, Replica(url, {}) as replica:
        publisher.publish().wait(PATIENCE)
        with torch.no_grad():
            model.weight[2, 3] += 1
        publisher.publish().wait(PATIENCE)
        replica.pull()
        assert same(replica, {"weight": model.weight.detach().contiguous().to(torch.bfloat16).view(torch.int16)
                              .numpy().view(np.uint16).reshape(-1)})  # fmt: skip


def test_wrapped_modules_are_published_under_their_own_names():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert set(module_source(compiled)()) == set(module_source(model)())
    assert set(module_source(torch.nn.DataParallel(model))()) == set(module_source(model)())
