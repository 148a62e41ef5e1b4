"""Layers that a vLLM server quantizes when it loads them (`--quantization fp8_per_block` and others), and layers of
checkpoints that are quantized themselves.

The arithmetic is vLLM's own: its functions are called, with one element and the largest magnitude of its group as a
group of their own where only some elements are needed. Kernels that lay codes out anew are refused by name.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from deltawire.engines.quantized.derive import Largest, QuantizedModel, QuantizedTensor
from deltawire.engines.quantized.recipes import CHUNK, CODES, Quantized, Recipe
from deltawire.errors import EngineRejected

# What vLLM calls its methods, by what its option calls them.
METHODS = {
    "Fp8PerBlockOnlineLinearMethod": "fp8_per_block",
    "Fp8PerBlockOnlineMoEMethod": "fp8_per_block",
    "Fp8PtpcOnlineLinearMethod": "fp8_per_channel",
    "Fp8PtpcOnlineMoEMethod": "fp8_per_channel",
    "Fp8PerTensorOnlineLinearMethod": "fp8_per_tensor",
    "Fp8PerTensorOnlineMoEMethod": "fp8_per_tensor",
    "Mxfp8OnlineLinearMethod": "mxfp8",
    "Mxfp8OnlineMoEMethod": "mxfp8",
}
# Codes and scales that are served as the checkpoint has them.
STORED = "stored"
# Kernels that compute from codes and scales as they were made; at most padded, or as a transposed view.
KERNELS = {
    "CutlassFP8ScaledMMLinearKernel", "PerTensorTorchFP8ScaledMMLinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel", "CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel", "EmulationMxfp8LinearKernel",
}  # fmt: skip
# How long a worker waits for the others, which do the same at the same time.
WAIT_SECONDS = 300
BACKENDS = {"TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS", "EMULATION"}


def layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """The layers of a model that are quantized, and how. Others than are known are refused by name."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is None or kind.startswith("Unquantized"):
            continue
        if kind.endswith("KVCacheMethod"):
            _check_cache(name, module)
            continue
        stored = _stored(module, method)
        if stored is not None:
            _check_kernel(name, stored)
            yield name, module, STORED
            continue
        if kind not in METHODS or getattr(method, "requantization_source", None) is not None:
            raise EngineRejected(
                f"{name} is quantized by {kind}, which cannot be changed in place: start the server with "
                f"--quantization {', '.join(sorted(set(METHODS.values())))} or without it",
                tensor=name,
            )
        _check_kernel(name, method)
        yield name, module, METHODS[kind]


def _check_cache(name: str, module: Any) -> None:
    """Refuse scales of a cache other than one: they are made of tensors that no parameter has any more."""
    for each in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
        if torch.as_tensor(getattr(module, each, 1.0)).ne(1).any():
            raise EngineRejected(
                f"{name} has {each} from a checkpoint, which cannot be changed in place: start the server without "
                "--kv-cache-dtype",
                tensor=name,
            )


def _stored(module: Any, method: Any) -> Any:
    """What has the kernel of a layer whose codes and scales are in the checkpoint, if it takes them as they are."""
    scheme: Any = method
    if type(method).__name__ == "CompressedTensorsLinearMethod":
        scheme = getattr(module, "scheme", None)
    kind = type(scheme).__name__
    if kind == "CompressedTensorsW8A8Fp8":
        return scheme if scheme.strategy in ("channel", "block") and not scheme.is_static_input_scheme else None
    return scheme if kind == "Fp8LinearMethod" and getattr(scheme, "block_quant", False) else None


def _check_kernel(name: str, method: Any) -> None:
    backend = getattr(method, "fp8_backend", None)
    if backend is not None:
        if backend.name not in BACKENDS:
            raise EngineRejected(
                f"vLLM keeps the experts of {name} in the order of {backend.value}, not as they were "
                "quantized: start the server with --moe-backend triton, or emulation for mxfp8",
                tensor=name,
            )
        return
    kernel = type(getattr(method, "fp8_linear", None) or method.kernel).__name__
    if kernel not in KERNELS:
        raise EngineRejected(
            f"{kernel} keeps the codes of {name} in its own order: start the server with VLLM_USE_DEEP_GEMM=0 "
            f"or --linear-backend, so that it uses one of {', '.join(sorted(KERNELS))}",
            tensor=name,
        )


def is_shared(module: Any, kind: str, parameter: str) -> bool:
    """Whether several workers have elements of one group, so that vLLM takes the largest magnitude of all of them."""
    if kind not in ("fp8_per_channel", "fp8_per_tensor"):
        return False
    experts = getattr(module.quant_method, "moe", None)
    if experts is not None:
        return experts.tp_size > 1 and (kind == "fp8_per_tensor" or parameter == "w2_weight")
    across = module.input_size != module.input_size_per_partition
    down = module.output_size != module.output_size_per_partition
    return module.tp_size > 1 and (across or (down and kind == "fp8_per_tensor"))


def _of_workers(name: str, layer: Any, known: Largest | None) -> Largest:
    """The largest of what the workers give that have a part of each matrix, over a connection of its own: it is used
    while they serve.
    """
    from vllm.distributed.parallel_state import get_tp_group

    ranks = get_tp_group().ranks
    size = getattr(getattr(layer.quant_method, "moe", None), "tp_size", len(ranks))
    if size != len(ranks):
        raise EngineRejected(
            f"the scales of {name} depend on the weights of {size} workers, but {len(ranks)} update together: use "
            "--quantization fp8_per_block, or --enable-expert-parallel",
            tensor=name,
        )
    if known is not None:
        return known
    group = torch.distributed.new_group(
        ranks, timedelta(seconds=WAIT_SECONDS), "gloo", use_local_synchronization=True
    )  # fmt: skip

    def largest(values: torch.Tensor) -> torch.Tensor:
        found = values.clone()
        try:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise EngineRejected(f"the workers cannot reach each other; restart the server: {error}") from error
        return found

    return largest


def find(model: torch.nn.Module) -> QuantizedModel:
    """The tensors that a model quantizes, with weights that are zero until they are loaded."""
    try:
        return _find(model)
    except ImportError as error:
        raise EngineRejected(f"a server that quantizes its weights needs vLLM 0.32: {error}") from error


def _find(model: torch.nn.Module) -> QuantizedModel:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found, largest = [], None
    for name, layer, kind in layers(model):
        if kind == STORED:
            continue
        for each, meta in get_layerwise_info(layer).restore_metadata[0].items():
            if each not in ("weight", "w13_weight", "w2_weight"):
                continue
            original = torch.zeros(meta.shape, dtype=meta.dtype, device="cpu")
            if meta.dtype not in (torch.bfloat16, torch.float16):
                raise EngineRejected(f"{name}.{each} is {meta.dtype} before it is quantized", tensor=name)
            codes, scales = _live(layer, each)
            if codes.dtype != CODES:
                raise EngineRejected(f"{name}.{each} is kept as {codes.dtype}, not as {CODES}", tensor=name)
            if kind in ("fp8_per_channel", "fp8_per_tensor"):
                codes = _untransposed(codes)
            codes = codes[tuple(slice(size) for size in meta.shape)]
            if codes.ndim == 2 and scales.numel() > 1 and kind == "fp8_per_channel":
                # A kernel may have padded them.
                scales = scales[: len(original)]
            recipe, shared = _recipe(kind, each), is_shared(layer, kind, each)
            if shared:
                largest = _of_workers(name, layer, largest)
            found.append(QuantizedTensor(f"{name}.{each}", original, recipe, codes, scales, is_shared=shared))
    if not found:
        return QuantizedModel([])
    from deltawire.kernels.cpu import warmup

    # What decodes and writes the weights in host memory, so that nobody waits for it in the first update.
    warmup.warm_up((16,))
    for width in (8, 32):
        warmup.warm_up_engines(warmup.Example(width))
    for recipe in {id(each.recipe): each.recipe for each in found}.values():
        prove(recipe, found[0].codes.device)
    return QuantizedModel(found, largest)


def _live(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales that a layer computes from."""
    scales = [f"{name}_scale_inv", f"{name}_scale"]
    found = next((getattr(layer, each) for each in scales if getattr(layer, each, None) is not None), None)
    if found is None:
        raise EngineRejected(f"{name} has no scales in {type(layer).__name__}", tensor=name)
    return _plain(getattr(layer, name)), _plain(found)


def _untransposed(value: torch.Tensor) -> torch.Tensor:
    """A matrix as it was before a kernel got a transposed view of it."""
    return value.t() if value.ndim == 2 and not value.is_contiguous() else value


def _as_stored(name: str, layer: Any, meta: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter, as it was when it was loaded."""
    found = _untransposed(_plain(getattr(layer, name)))
    if (found.dtype, found.shape) != (meta.dtype, meta.shape):
        raise EngineRejected(
            f"{name} of {type(layer).__name__} is {meta.dtype} {list(meta.shape)} in the checkpoint and "
            f"{found.dtype} {list(found.shape)} in the server: its layout is not known",
            tensor=name,
        )
    return found


def _plain(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be changed, however it was made."""
    flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def as_loaded(model: torch.nn.Module, quantized: QuantizedModel) -> torch.nn.Module:
    """A second model of the same modules' content, but that quantized layers have the parameters that are loaded into.
    The model itself stays as it is: it may serve meanwhile.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    twins: dict[torch.nn.Module, torch.nn.Module] = {}
    twin = twin_of(model, twins)
    for name, layer, kind in layers(model):
        own = twins[layer]
        restored = get_layerwise_info(layer).restore_metadata[0]
        for each in [each for each in own._parameters if each not in restored and "scale" in each]:
            del own._parameters[each]
        for each, meta in restored.items():
            tensor = quantized.tensors.get(f"{name}.{each}")
            if tensor is not None:
                value = tensor.original.view(tensor.original.shape)
            elif kind == STORED and each in ("weight", "weight_scale", "weight_scale_inv"):
                value = _as_stored(each, layer, meta)
            else:
                continue
            value.__class__ = meta.__class__
            value.__dict__ = dict(meta.__dict__)
            restore_layer_refs(value, own)
            value.weight_loader = _get_original_loader(value)
            own._parameters[each] = value
    return twin


def twin_of(module: torch.nn.Module, twins: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """A module with the same content, whose parameters, buffers and attributes can be set to others."""
    if module not in twins:
        twin = twins[module] = copy(module)
        twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
        twin._modules = {name: None if each is None else twin_of(each, twins) for name, each in module._modules.items()}
    return twins[module]


def _pairs(values: torch.Tensor, largest: torch.Tensor, width: int) -> torch.Tensor:
    """Each element in a row of its own, after the largest magnitude of its group."""
    # Of two rows at least: compilers treat a single one as something else.
    rows = torch.zeros(max(len(values), 2), width, dtype=values.dtype, device=values.device)
    rows[: len(values), 0], rows[: len(values), 1] = largest, values
    return rows


def _chunked(quantize: Any, width: int) -> Any:
    """A function of rows as one of elements and the largest magnitudes of their groups."""

    def elements(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
        step = 2 * CHUNK // width
        found = []
        for start in range(0, max(len(values), 1), step):
            part = slice(start, start + step)
            codes, scales = quantize(_pairs(values[part], largest[part], width))
            number = len(values[part])
            found.append((codes[:number, 1].view(torch.uint8), scales.view(len(codes), -1)[:number, 0]))
        codes, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
        return codes.view(CODES), scales

    return elements


@cache
def _recipe(kind: str, parameter: str) -> Recipe:
    """How vLLM quantizes a parameter, by its own functions."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.online.fp8 import (
        _fp8_channel_scale,
        _fp8_quant_per_channel,
        _fp8_scale,
    )
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def block(size: Sequence[int]) -> Any:
        # Compiled for each way in which gradients are kept.
        cast = torch.no_grad()(per_block_cast_to_fp8)
        return lambda rows: cast(rows, block_size=list(size), use_ue8m0=False)

    def row(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
        scales = _fp8_channel_scale(largest)
        return _fp8_quant_per_channel(values[:, None], scales[:, None])[:, 0], scales

    def channel(matrix: torch.Tensor) -> Quantized:
        scales = _fp8_channel_scale(weight_amax(matrix, dim=-1, keepdim=True))
        return _fp8_quant_per_channel(matrix, scales), scales

    def token(rows: torch.Tensor) -> Quantized:
        codes, scales = ops.scaled_fp8_quant(rows, scale=None, use_per_token_if_dynamic=True)
        return codes, scales

    def tensor(values: torch.Tensor, largest: torch.Tensor) -> Quantized:
        codes = torch.empty(values.shape, dtype=CODES, device=values.device)
        scales = _fp8_scale(largest)
        for each in torch.unique(scales):
            own = scales == each
            codes[own] = ops.scaled_fp8_quant(values[own][None], scale=each.reshape(1))[0][0]
        return codes, scales

    def whole(matrix: torch.Tensor) -> Quantized:
        scales = _fp8_scale(weight_amax(matrix).reshape(1))
        return ops.scaled_fp8_quant(matrix, scale=scales)[0], scales

    if kind == "fp8_per_block":
        return Recipe(kind, (128, 128), _chunked(block((1, 2)), 2), block((128, 128)))
    if kind == "mxfp8":
        return Recipe(kind, (1, 32), _chunked(mxfp8_e4m3_quantize, 32), mxfp8_e4m3_quantize, torch.uint8)
    if kind == "fp8_per_tensor":
        return Recipe(kind, (0, 0), tensor, whole)
    if parameter == "w13_weight":
        return Recipe(kind, (1, 0), _chunked(token, 16), token)
    return Recipe(kind, (1, 0), row, channel)


def prove(recipe: Recipe, device: torch.device) -> None:
    """Quantize a matrix as a whole, and element by element: the bits must be the same. Compiles both, too."""
    generator = torch.Generator().manual_seed(1)
    rows = 384 if device.type == "cpu" else 8192
    sizes = torch.exp2(torch.randint(-20, 8, (rows, 1), generator=generator))
    matrix = torch.randn(rows, 512, generator=generator) * sizes
    matrix[128:256, 128:256] = 0
    matrix = matrix.bfloat16().to(device)
    alone = Recipe(recipe.name, recipe.group, recipe.elements, None, recipe.scale_dtype)
    for one, other in zip(recipe.quantize(matrix), alone.quantize(matrix), strict=True):
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise EngineRejected(
                f"{recipe.name} on {device} gives different codes for single elements than for a whole matrix: this "
                "vLLM cannot be updated in place with it"
            )
