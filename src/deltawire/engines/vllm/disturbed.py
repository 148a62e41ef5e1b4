"""Parameters of a vLLM worker that are changed for a moment, for `deltawire prove`."""

import json
from hashlib import sha256
from typing import Any

import torch

from deltawire import __version__
from deltawire.engines.vllm.copies import absorbed


class Disturbed:
    """A model, and the bits that its parameters had."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self._model, self._config = model, config
        self._kept: dict[str, torch.Tensor] = {}

    def about(self) -> dict[str, Any]:
        """The parameters, how many experts each has, and what a result depends on."""
        import vllm

        config, own = self._config, self._parameters()
        kinds = [[name, str(value.dtype), list(value.shape)] for name, value in own.items()]
        model = json.dumps([config.model_config.hf_config.to_dict(), kinds], sort_keys=True, default=str)
        cache = config.cache_config
        return {
            "about": {
                "architectures": config.model_config.hf_config.architectures,
                "model": sha256(model.encode()).hexdigest()[:16],
                "flags": config.compute_hash(),
                "device": str(next(iter(own.values())).device.type),
                "versions": {"vllm": str(vllm.__version__), "torch": str(torch.__version__), "deltawire": __version__},
            },
            "parameters": [[name, 0 if self._gate(name) is None else len(value)] for name, value in own.items()],
            "block_size": cache.block_size if cache.enable_prefix_caching else 0,
            "max_tokens": config.model_config.max_model_len,
        }

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Each memory once: views of it are the same, and what is made from others follows them."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        made = absorbed(self._model)
        for name, value in self._model.named_parameters():
            if value.numel() and name not in made:
                found.setdefault(value.untyped_storage().data_ptr(), (name, value.data))
        return dict(found.values())

    def _gate(self, name: str) -> str | None:
        """The parameter that chooses between the experts of a layer, one row for each; None if there are none."""
        layer, experts, _ = name.partition(".experts.")
        value = self._model.get_parameter(name)
        if not experts or value.ndim < 2:
            return None
        for each, gate in self._model.named_parameters():
            if each.startswith(f"{layer}.") and ".experts." not in each and gate.ndim == 2 and len(gate) == len(value):
                return str(each)
        return None

    def disturb(self, name: str, part: int | None, strength: float) -> None:
        value = self._keep(name)
        value = value if part is None else value[part]
        size = float(value.float().square().mean().sqrt()) or 0.1
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.device)
        value.copy_(value.float() + strength * size * noise)

    def steer(self, name: str, part: int, seed: int) -> bool:
        """Tokens on one side of a random plane go to one expert."""
        gate = self._gate(name)
        if gate is None:
            return False
        value = self._keep(gate)
        value.zero_()
        value[part] = torch.randn(value.shape[1], generator=torch.Generator().manual_seed(seed)).to(value)
        return True

    def _keep(self, name: str) -> torch.Tensor:
        value = self._model.get_parameter(name).data
        if name not in self._kept:
            self._kept[name] = value.clone()
        return value

    def restore(self) -> None:
        for name, bits in self._kept.items():
            self._model.get_parameter(name).data.copy_(bits)
        self._kept.clear()
