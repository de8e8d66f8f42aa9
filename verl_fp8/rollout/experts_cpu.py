"""vLLM's mixture-of-experts layers on CPU: true W8A8 block experts on our quantiser, and live weights in bf16 ones.

vLLM asks an oracle which class computes a layer's experts (vllm/model_executor/layers/fused_moe/oracle). Its two
functions ``backend_to_kernel_cls`` are wrapped, since the oracles have no registration. vLLM's only block-FP8 class for
CPU needs AMX and quantises no activations; its bf16 class packs the weights when it is built, so that no weight sync
reaches them.
"""

import torch
import wrapt

from verl_fp8.numerics.experts import mix_experts, spans
from verl_fp8.numerics.linear import gemm
from verl_fp8.numerics.quantize import QuantizedTensor, quantize_activation
from verl_fp8.rollout.serving import DEQUANTIZED
from verl_fp8.switches.settings import settings_of
from verl_fp8.upstream.contract import require


def install_experts_cpu() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("rollout.experts_cpu")
    from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized

    for oracle, choose in ((fp8, _choose_fp8), (unquantized, _choose_unquantized)):
        if not isinstance(oracle.backend_to_kernel_cls, wrapt.FunctionWrapper):
            wrapt.wrap_function_wrapper(oracle, "backend_to_kernel_cls", choose)


def _choose_fp8(wrapped, instance, args, kwargs):
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    if settings_of(get_current_vllm_config_or_none()) is None:
        return wrapped(*args, **kwargs)
    backend = args[0] if args else kwargs["backend"]
    # TRITON is the backend whose weights vLLM leaves as they were loaded (convert_to_fp8_moe_kernel_format) and whose
    # activations are quantised; under CPU it packs them. No other class may serve.
    return [reference_experts()] if backend == Fp8MoeBackend.TRITON else []


def _choose_unquantized(wrapped, instance, args, kwargs):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    backend = args[0] if args else kwargs["backend"]
    return [live_experts()] if backend == UnquantizedMoeBackend.CPU else wrapped(*args, **kwargs)


def _answers() -> type:
    """What vLLM's oracle asks of both classes; built on call, since the base exists inside vLLM's processes only."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.platforms import current_platform

    class Answers(mk.FusedMoEExpertsModular):
        expects_unquantized_inputs = True

        @staticmethod
        def activation_format():
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device():
            return current_platform.is_cpu()

        @staticmethod
        def _supports_no_act_and_mul():
            return False

        @staticmethod
        def _supports_activation(activation):
            return activation == MoEActivation.SILU

        @staticmethod
        def _supports_parallel_config(moe_parallel_config):
            return not moe_parallel_config.use_all2all_kernels

        @staticmethod
        def _supports_routing_method(routing_method, weight_key, activation_key):
            return True  # vLLM's router runs before the experts

    return Answers


def _base() -> type:
    """What both classes share, how they compute; built on call, as :func:`_answers`."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class Experts(_answers()):
        def workspace_shapes(
            self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
        ):
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def apply(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            a1q_scale,
            a2_scale,
            workspace13,
            workspace2,
            expert_tokens_meta,
            apply_router_weight_on_input,
        ):
            if apply_router_weight_on_input:  # vLLM has multiplied already
                topk_weights = torch.ones_like(topk_weights)
            output.copy_(_mix(self.product, hidden_states, w1, w2, topk_weights, topk_ids, expert_map))

        def product(self, x, weight, which, expert):
            """[rows, K] times expert ``expert``'s [N, K] of ``weight``, transposed."""
            raise NotImplementedError

    return Experts


def _mix(product, x, w1, w2, topk_weights, topk_ids, expert_map) -> torch.Tensor:
    """[tokens, hidden] of this rank's experts, by the trainer's :func:`~verl_fp8.numerics.experts.mix_experts`.

    Args:
        product: (rows, weight, its name, expert) -> rows times that expert's weight, transposed.
        x: [tokens, hidden].
        w1: [experts, 2 * width, hidden], gate before up.
        w2: [experts, hidden, width].
        topk_weights, topk_ids: [tokens, k], from vLLM's router.
        expert_map: global number of an expert -> its number here, negative for another rank's; None where all are here.
    """
    local = w1.shape[0]
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()]
        topk_ids = torch.where(topk_ids < 0, local, topk_ids)

    def grouped(rows, counts):
        y = torch.zeros_like(rows)
        for expert, part in spans(counts):
            gate, up = product(rows[part], w1, "w1", expert).chunk(2, dim=-1)
            y[part] = product(torch.nn.functional.silu(gate) * up, w2, "w2", expert)
        return y

    return mix_experts(x, topk_ids, topk_weights, local, grouped)


def reference_experts() -> type:
    """The FP8 class."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym

    class ReferenceFp8Experts(_base()):
        """Every projection as Q(x) @ Q(W).T by verl_fp8.numerics.quantize, the trainer's own functions; blocks of any
        size."""

        @staticmethod
        def _supports_quant_scheme(weight_key, activation_key):
            # The oracle asks with this key for every block-quantised model; the recipe sets the group.
            return activation_key == kFp8Dynamic128Sym

        def __init__(self, moe_config, quant_config):
            super().__init__(moe_config, quant_config)
            self.recipe = settings_of(get_current_vllm_config()).recipe

        def product(self, x, weight, which, expert):
            recipe = self.recipe
            # Once a sync, as in linear_cpu.w8a8; the extension drops it.
            kept = self.__dict__.setdefault(DEQUANTIZED, {})
            operand = kept.get((which, expert))
            if operand is None:
                scale_inv = (self.w1_scale if which == "w1" else self.w2_scale)[expert]
                operand = QuantizedTensor(weight[expert], scale_inv, recipe.weight_block).dequantize()
                kept[which, expert] = operand
            return gemm(quantize_activation(x, recipe), operand, x.dtype)

    return ReferenceFp8Experts


def live_experts() -> type:
    """The bf16 class."""

    class LiveExperts(_base()):
        """Experts in high precision on the parameters as they are, so that a weight sync reaches them."""

        @staticmethod
        def _supports_quant_scheme(weight_key, activation_key):
            return weight_key is None and activation_key is None

        def product(self, x, weight, which, expert):
            return torch.nn.functional.linear(x, weight[expert])

    return LiveExperts
