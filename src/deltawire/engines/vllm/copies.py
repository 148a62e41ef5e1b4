"""What vLLM computes from besides the parameters that it has loaded: copies of them, in another dtype or order.

A change of a parameter does not reach such a copy. Those that are known are made again after each change; a model with
any other is refused by name.
"""

import inspect
from collections.abc import Collection, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from deltawire.engines.vllm import cpu
from deltawire.engines.vllm.quantized import layers, twin_of
from deltawire.errors import EngineRejected

# Scales of a cache that is not quantized, which are one.
_FIXED = {"_k_scale", "_v_scale", "_q_scale", "_prob_scale"}
# What latent attention derives from `kv_b_proj`.
_ABSORBED = ("W_UV", "W_UK_T")
# How experts' weights are used as they were loaded.
_PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON", "CPU"}
_DEPTH = 3


def check(model: torch.nn.Module, config: Any) -> set[str]:
    """Refuse what cannot be changed in place, by name. Returns parameters and buffers that no run fills."""
    if is_one_of_several(config.parallel_config) and config.parallel_config.data_parallel_size > 1:
        # Its engines pause and compute together with those of the others, which another agent updates, or none.
        raise EngineRejected(
            "the server shares its experts with other servers, so it cannot be paused alone: start one server for all "
            "data-parallel engines, without --data-parallel-rank, -start-rank, -external-lb and -hybrid-lb"
        )
    if config.parallel_config.enable_eplb:
        raise EngineRejected("the server moves experts between its workers: start it without --enable-eplb")
    if getattr(config.model_config, "enable_sleep_mode", False):
        # Asleep, their memory is gone; after a sleep of level 2 it has anything, and nothing here would show that.
        raise EngineRejected("the server may drop its weights when it sleeps: start it without --enable-sleep-mode")
    packed = cpu.packed_layer(model)
    if packed is not None:
        raise EngineRejected(
            f"vLLM has packed the weights of {packed} for the CPU and computes from the packed copy, so changes in "
            f"place would be lost: start the server with {cpu.SWITCH}=1, which keeps them unpacked",
            tensor=packed,
        )
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in _PLAIN_EXPERTS:
            raise EngineRejected(
                f"vLLM keeps the experts of {name} in the order of {backend.value}, not as they were loaded: "
                "start the server with --moe-backend triton",
                tensor=name,
            )
        uses_amx = getattr(module, "is_amx_bmm_enabled", False)
        if uses_amx or getattr(module, "dcp_q_replicate", False):
            advice = ": start the server with --attention-backend CPU_MLA" if uses_amx else ""
            raise EngineRejected(f"{name} computes from copies of kv_b_proj with another layout{advice}", tensor=name)
    if config.model_config.quantization is not None:
        list(layers(model))
        for name, module in model.named_modules():
            if hasattr(module, "kv_b_proj"):
                raise EngineRejected(f"{name} computes from copies of kv_b_proj, which is quantized", tensor=name)
    _refuse_others(model)
    return _FIXED | absorbed(model)


def is_one_of_several(parallel: Any) -> bool:
    """Whether other servers have the other data-parallel engines. Those of dense models are independent, and in each of
    them `data_parallel_size` is one.
    """
    return bool(parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb)


def absorbed(model: torch.nn.Module) -> set[str]:
    """Parameters that are made from `kv_b_proj`, and are no views of it."""
    return {f"{name}.{each}" for name, module in _absorbing(model) for each in _ABSORBED}


class Copies:
    """The copies of a model that are known."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._absorbing = [module for _, module in _absorbing(model)]
        self._sinks = list(_sinks(model))

    def refresh(self, tensors: Collection[str]) -> None:
        for impl, source in self._sinks:
            # Made when it is first needed, on a CPU.
            if not _shares(impl.sinks, source):
                with torch.inference_mode():
                    impl.sinks.copy_(source)
        for module in self._absorbing:
            module.process_weights_after_loading(self._dtype)

    def holds(self) -> bool:
        sinks = all(torch.equal(impl.sinks, source.to(impl.sinks.dtype)) for impl, source in self._sinks)
        return sinks and all(map(self._is_absorbed, self._absorbing))

    def _is_absorbed(self, module: torch.nn.Module) -> bool:
        """A twin computes the copies again: the module may serve meanwhile."""
        twin: Any = twin_of(module, {})
        for each in _ABSORBED:
            setattr(twin, each, deepcopy(getattr(module, each)))
        twin.process_weights_after_loading(self._dtype)
        return all(torch.equal(getattr(twin, each), getattr(module, each)) for each in _ABSORBED)


def _sinks(model: torch.nn.Module) -> Iterator[tuple[Any, torch.Tensor]]:
    """Attention with sinks, and the parameter that they come from."""
    own = dict(model.named_parameters())
    for name, module in model.named_modules():
        impl: Any = getattr(module, "impl", None)
        if getattr(impl, "sinks", None) is None:
            continue
        found = [
            value for each, value in own.items()
            if _shares(impl.sinks, value) or each == f"{name.rpartition('.')[0]}.sinks"
        ]  # fmt: skip
        if not found:
            raise EngineRejected(f"it is not known which parameter the attention sinks of {name} are", tensor=name)
        yield impl, found[0].data


def _absorbing(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Latent attention that computes from copies of `kv_b_proj`; often they are views."""
    for name, module in model.named_modules():
        found = [getattr(module, each, None) for each in _ABSORBED]
        if all(torch.is_tensor(each) for each in found) and not _shares(found[0], module.kv_b_proj.weight):
            yield name, module


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _refuse_others(model: torch.nn.Module) -> None:
    """Refuse a copy of a parameter that is not known: the same values, in whatever order and dtype, elsewhere."""
    own = {name: value for name, value in model.named_parameters() if value.numel()}
    storages = {value.untyped_storage().data_ptr() for value in own.values()}
    sizes: dict[int, list[str]] = {}
    for name, value in own.items():
        if value.is_floating_point() and value.numel() > 1:
            sizes.setdefault(value.numel(), []).append(name)
    for name, module in model.named_modules():
        known = getattr(getattr(module, "impl", None), "sinks", None)
        for path, value in _reachable(vars(module), name, _DEPTH, {id(known)}):
            if not value.is_floating_point() or value.untyped_storage().data_ptr() in storages:
                continue
            # A copy is kept near what it is of.
            near = name.rpartition(".")[0]
            for each in sizes.get(value.numel(), []):
                if each.startswith(near) and _same_values(value, own[each]):
                    raise EngineRejected(
                        f"{path} has a copy of {each}, so what is computed from it would not see changes: such a "
                        "server cannot be updated in place",
                        tensor=each,
                    )


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Bytes cannot be sorted as numbers.
    dtype = one.dtype if one.itemsize > 1 else torch.float32
    ordered = other.detach().to(dtype).reshape(-1).sort().values
    return bool(ordered[0] != ordered[-1]) and torch.equal(one.detach().to(dtype).reshape(-1).sort().values, ordered)


def _reachable(found: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that an object holds, other than its parameters and what its submodules hold."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if torch.is_tensor(found):
        if found.layout is torch.strided and not found.is_meta:
            yield path, found
        return
    if depth < 0 or isinstance(found, torch.nn.Module):
        return
    inner: dict[Any, Any] = {}
    if isinstance(found, dict):
        inner = {key: value for key, value in found.items() if key not in ("_parameters", "_modules")}
    elif isinstance(found, list | tuple | set):
        inner = dict(enumerate(found))
    elif isinstance(found, partial):
        inner = {"func": found.func, "args": found.args, **found.keywords}
    elif inspect.isfunction(found) and found.__closure__:
        inner = dict(inspect.getclosurevars(found).nonlocals)
    elif type(found).__module__.startswith("vllm.") and not type(found).__module__.startswith("vllm.config"):
        inner = getattr(found, "__dict__", {})
    for key, value in inner.items():
        yield from _reachable(value, f"{path}.{key}", depth - (not isinstance(found, dict)), seen)
