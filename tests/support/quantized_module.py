"""A torch module that computes from codes and scales, which deltawire derives: for the conformance suite."""

import torch

from deltawire.engines import conformance
from deltawire.engines.engine import Served
from deltawire.engines.quantized.derive import QuantizedModel, QuantizedTensor
from deltawire.engines.quantized.recipes import RECIPES, Groups
from deltawire.engines.torch import TorchEngine
from support.half_writes import fail_next_write

SHAPES = {"up": (160, 130), "down": (130, 160), "experts": (3, 40, 96), "norm": (130,)}


class QuantizedEngine(TorchEngine):
    """Matrices are quantized with one recipe; `up` has its codes in a transposed view."""

    def __init__(self, weights, recipe):
        model = torch.nn.Module()
        for name, value in weights.items():
            model.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        super().__init__(model, threads=1)
        tensors = []
        for name, value in weights.items():
            if value.ndim > 1:
                shape = value.shape if name != "up" else value.shape[::-1]
                codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
                scales = torch.zeros(Groups(recipe, value.shape).count, dtype=recipe.scale_dtype)
                tensors.append(QuantizedTensor(name, model.get_parameter(name).data, recipe,
                                               codes.t() if name == "up" else codes, scales))  # fmt: skip
        self.quantized = QuantizedModel(tensors)
        self.quantized.load()
        self._is_loading = False

    def _find(self, specs):
        return super()._find(specs)._replace(quantized=self.quantized)

    def load(self, weights, folder, state):
        self._is_loading = True
        try:
            return super().load(weights, folder, state)
        finally:
            self._is_loading = False

    def digest(self):
        if self._is_loading:
            self.quantized.load()
        return super().digest()

    def status(self):
        found, live = super().status(), self._live.status()
        return Served(
            found.boot, found.states, found.version, found.interrupted, live.get("quantized"), live.get("derived")
        )


def harness_of(name, engine=QuantizedEngine):
    """A harness for one recipe, which compares with the recipe done anew."""

    class QuantizedModule(conformance.QuantizedHarness):
        timeout_seconds = 20.0

        def weights(self):
            torch.manual_seed(0)
            return {each: torch.randn(shape).bfloat16() for each, shape in SHAPES.items()}

        def start(self, weights):
            self.engine = engine(self.tensors(weights), RECIPES[name])
            return self.engine

        def tensors(self, weights):
            return {
                each: torch.from_numpy(weights[each].bits.copy()).view(torch.bfloat16).view(SHAPES[each])
                for each in SHAPES
            }

        def served(self):
            found = {"norm": self.engine.model.norm.data}
            for each in self.engine.quantized.tensors.values():
                found |= {f"{each.name} codes": each.codes.contiguous(), f"{each.name} scales": each.scales}
            return found

        def fresh(self, weights):
            found = {}
            for each, value in self.tensors(weights).items():
                if value.ndim == 1:
                    found[each] = value
                    continue
                codes, scales = RECIPES[name].quantize(value)
                found |= {f"{each} codes": codes, f"{each} scales": scales}
            return found

        def request(self):
            with self.engine.serving():
                before = {each: value.clone().view(torch.uint8) for each, value in self.served().items()}
                assert all(torch.equal(before[each], value.view(torch.uint8)) for each, value in self.served().items())

        def fail_next_write(self):
            fail_next_write(self.engine._live._memory, slice(None, None, 2))

        def close(self):
            pass

    return QuantizedModule
