"""vLLM on a CPU packs weights for faster products when it has loaded them, and computes from the packed copies.

Changes written into the parameters would then be lost, in silence for the output layer. So packed weights are refused,
and a server started with `DELTAWIRE_CPU_UNPACKED=1` computes from the parameters themselves, as on a GPU.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

SWITCH = "DELTAWIRE_CPU_UNPACKED"


def keep_unpacked() -> None:
    """Make linear layers and experts of this process compute from their parameters."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = _dispatch
        CPUUnquantizedExperts.process_weights_after_loading = _process_nothing
        routes = hasattr(CPUUnquantizedExperts, "_select_experts")
        CPUUnquantizedExperts.apply = _route_and_apply if routes else _apply_experts


def packed_layer(model: torch.nn.Module) -> str | None:
    """The first layer that computes from something else than its parameters, if there is one."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    experts_packed = CPUUnquantizedExperts.process_weights_after_loading is not _process_nothing
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", linear) is not linear:
            return str(name)
        if experts_packed and hasattr(module, "w13_weight"):
            return str(name)
    return None


def _dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = linear


def _process_nothing(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False
    for name in ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function"):
        if hasattr(self, name):
            setattr(self, name, getattr(layer, name))


def _route_and_apply(
    self: Any, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, router_logits: torch.Tensor,
    activation: Any, global_num_experts: int, expert_map: torch.Tensor | None, a1q_scale: torch.Tensor | None,
    apply_router_weight_on_input: bool, num_expert_group: int | None = None,
    e_score_correction_bias: torch.Tensor | None = None, routed_scaling_factor: float | None = None,
    topk_group: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """As vLLM 0.29 has it, whose experts on a CPU also choose among themselves."""
    topk_weights, topk_ids = self._select_experts(
        hidden_states, router_logits, num_expert_group, topk_group, e_score_correction_bias, routed_scaling_factor
    )
    if apply_router_weight_on_input:
        hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
    output = torch.empty_like(hidden_states)
    _apply_experts(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )  # fmt: skip
    return output


def _apply_experts(
    self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
    expert_map: torch.Tensor | None, *_: Any, apply_router_weight_on_input: bool = False, **__: Any,
) -> None:  # fmt: skip
    """Each expert's product for the tokens that it was chosen for, added up in the order of the experts."""
    from vllm.model_executor.layers.activation import SwigluOAIAndMul
    from vllm.model_executor.layers.fused_moe.activation import (
        ApplyMoEActivationConfig,
        MoEActivation,
        apply_moe_activation,
    )

    config = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for number in range(len(w1)):
        own = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        tokens, slots = (own == number).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        inner = linear(hidden_states[tokens], w1[number], None if self.w1_bias is None else self.w1_bias[number])
        if activation is MoEActivation.SWIGLUOAI:
            # vLLM for the CPU has no operator for it.
            half = SwigluOAIAndMul.forward_native(SimpleNamespace(alpha=1.702, limit=7.0), inner)
        else:
            half = inner.new_empty(len(tokens), inner.shape[1] // 2 if activation.is_gated else inner.shape[1])
            apply_moe_activation(activation, half, inner, activation_config=config)
        result = linear(half, w2[number], None if self.w2_bias is None else self.w2_bias[number]).float()
        if not apply_router_weight_on_input:
            result = result * topk_weights[tokens, slots, None].float()
        total.index_add_(0, tokens, result)
    output.copy_(total)
