"""vLLM on CPU: true W8A8 linear layers on our quantiser, and live weights in unquantised layers.

The block kernel goes into vLLM's own kernel table (vllm/model_executor/kernels/linear/__init__.py,
_POSSIBLE_FP8_BLOCK_KERNELS); ``register_linear_kernel`` there has no block kind. vLLM's only CPU block kernel needs AMX
and quantises no activations.

Weights with one scale a tensor or a channel are a quantisation method of our own, through vLLM's registry: vLLM's
method for them (fp8.py, process_fp8_weight_tensor_strategy) requantises the parts of a fused layer to their largest
scale and transposes the codes, so that the rollout would hold other codes than the trainer sent, and no later sync
would fit. Here each part of a fused layer keeps its own scale.
"""

import torch
import wrapt

from verl_fp8.numerics import exact
from verl_fp8.numerics.linear import gemm
from verl_fp8.numerics.quantize import QuantizedTensor, quantize_activation
from verl_fp8.numerics.recipe import Recipe, scales_over
from verl_fp8.rollout import derived, experts_cpu
from verl_fp8.rollout.arguments import METHOD
from verl_fp8.rollout.serving import DEQUANTIZED
from verl_fp8.switches.settings import settings_of
from verl_fp8.upstream import patched
from verl_fp8.upstream.contract import require


def install_linear_cpu() -> None:
    """Idempotent: vLLM loads general plugins once a process but may call the function again."""
    require("rollout.linear_cpu")
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.platforms import PlatformEnum

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(reference_config())
    kernel = reference_kernel()
    table = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if all(k.__name__ != kernel.__name__ for k in table):
        table.insert(0, kernel)
    name = "dispatch_cpu_unquantized_gemm"
    if not isinstance(utils.dispatch_cpu_unquantized_gemm, wrapt.FunctionWrapper) and not patched.carries(utils, name):
        wrapt.wrap_function_wrapper(utils, name, _live_weight)
    experts_cpu.install_experts_cpu()
    derived.keep_plain_mla()


def _live_weight(wrapped, instance, args, kwargs):
    # vLLM packs 2-D weights for oneDNN and empties layer.weight: the first sync then fails, and lm_head silently keeps
    # the old values. F.linear on the live parameter is as fast at rollout sizes and always current.
    layer = args[0] if args else kwargs["layer"]
    if layer.weight.ndim == 2:
        layer.cpu_linear = live_linear(layer)
        return None
    return wrapped(*args, **kwargs)


def live_linear(layer: torch.nn.Module):
    """The product (x, weight, bias) of an unquantised layer, on the parameter as it is when called."""
    return _exact_dense(layer) if _exact_run() else torch.nn.functional.linear


def _exact_run() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    settings = settings_of(get_current_vllm_config_or_none())
    return settings is not None and settings.exact


def _exact_dense(layer: torch.nn.Module):
    """The exact mode's product for one unquantised layer: logits in float32, anything else in the input's dtype."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head = isinstance(layer, VocabParallelEmbedding)
    return lambda x, weight, bias: exact.dense(x, weight, bias, torch.float32 if head else x.dtype)


def w8a8(
    layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, accumulate: torch.dtype
) -> torch.Tensor:
    """y = Q(x) @ Q(W).T + bias of one of vLLM's linear layers, by verl_fp8.numerics.quantize.

    Args:
        layer: holds ``weight`` (codes [N, K]), ``weight_scale_inv``, and ``logical_widths``, the rows of its fused
            parts.
        x: [..., K], this rank's part. A per-token or per-tensor scale covers that part only: with tensor parallelism a
            row-parallel layer's scale is over its own columns.
        accumulate: see :func:`verl_fp8.numerics.linear.gemm`.

    Returns:
        [..., N] in x's dtype.
    """
    weight = layer.__dict__.get(DEQUANTIZED)
    if weight is None:
        # Once a sync: dequantising on every call costs three times the GEMM. The extension drops it.
        weight = layer.__dict__[DEQUANTIZED] = _dequantized(layer, recipe, accumulate)
    flat = x.reshape(-1, x.shape[-1])
    y = gemm(quantize_activation(flat, recipe), weight, x.dtype, accumulate=accumulate)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _dequantized(layer: torch.nn.Module, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]; a per-tensor scale covers one part of a fused layer."""
    widths = layer.logical_widths
    scales = layer.weight_scale_inv.data.split([scales_over(width, recipe.weight_block[0]) for width in widths])
    parts = [
        QuantizedTensor(codes, scale_inv, recipe.weight_block).dequantize(dtype)
        for codes, scale_inv in zip(layer.weight.data.split(widths), scales, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def reference_kernel() -> type:
    """The kernel class; built on call, since its base can only be imported inside vLLM's processes."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import current_platform

    class ReferenceFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
        """y = Q(x) @ Q(W).T by verl_fp8.numerics.quantize, the trainer's own function; blocks of any size."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            return (True, None) if current_platform.is_cpu() else (False, "runs on CPU only.")

        @classmethod
        def can_implement(cls, config):
            if settings_of(get_current_vllm_config()) is None:
                return False, "serves verl_fp8's rollout only."
            return super().can_implement(config)

        def __init__(self, config):
            super().__init__(config)
            settings = settings_of(get_current_vllm_config())
            self.recipe = settings.recipe
            self.accumulate = exact.WIDE if settings.exact else torch.float32

        def process_weights_after_loading(self, layer):
            """Nothing: the parameters stay as loaded, so that every sync lands in them."""

        def apply_weights(self, layer, x, bias=None, **kwargs):
            return w8a8(layer, x, bias, self.recipe, self.accumulate)

        def apply_block_scaled_mm(self, A, B, As, Bs):
            raise NotImplementedError("apply_weights does the whole product")

    return ReferenceFp8BlockKernel


def reference_config() -> type:
    """The class of ``quant_method: verl_fp8``; built on call, as :func:`reference_kernel`."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    method = reference_method()

    class ReferenceFp8Config(QuantizationConfig):
        """Which linear layers of a model are ours: all but ``ignored_layers``."""

        def __init__(self, ignored_layers):
            super().__init__()
            self.ignored_layers = ignored_layers

        @classmethod
        def get_name(cls):
            return METHOD

        @classmethod
        def get_supported_act_dtypes(cls):
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls):
            return 0

        @staticmethod
        def get_config_filenames():
            return []

        @classmethod
        def from_config(cls, config):
            return cls(config["ignored_layers"])

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
            # verl knows three values of rollout.quantization and passes on `fp8`; the model's configuration says which.
            return METHOD if hf_quant_cfg.get("quant_method") == METHOD else None

        def get_quant_method(self, layer, prefix):
            if not isinstance(layer, LinearBase):
                return None
            if is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping):
                return UnquantizedLinearMethod()
            return method(settings_of(get_current_vllm_config()).recipe)

    return ReferenceFp8Config


def reference_method() -> type:
    """The class that such a layer is served by; built on call, as :func:`reference_kernel`."""
    from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

    @register_weight_loader_v2_supported_method
    class ReferenceFp8LinearMethod(LinearMethodBase):
        """y = Q(x) @ Q(W).T by verl_fp8.numerics.quantize, with one scale a weight tensor or a channel of it."""

        # rollout.worker.fp8_modules knows the layers of the recipe by it.
        serves_verl_fp8 = True

        def __init__(self, recipe):
            self.recipe = recipe

        def create_weights(
            self,
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        ):
            loader = extra_weight_attrs["weight_loader"]
            _add_parameters(layer, input_size_per_partition, output_partition_sizes, self.recipe, loader)

        def process_weights_after_loading(self, layer):
            """Nothing: the parameters stay as loaded, so that every sync lands in them."""

        def apply(self, layer, x, bias=None):
            return w8a8(layer, x, bias, self.recipe, torch.float32)

    return ReferenceFp8LinearMethod


def _add_parameters(layer: torch.nn.Module, columns: int, widths: list[int], recipe: Recipe, loader) -> None:
    """Give one of vLLM's linear layers its codes [sum of widths, columns] and their scales, one a part or a row.

    Args:
        widths: rows of the layer's fused parts, this rank's.
        loader: vLLM's loader of the layer's weights.
    """
    from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

    rows = sum(widths)
    layer.logical_widths, layer.weight_block_size = widths, list(recipe.weight_block)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    layer.register_parameter(
        "weight", ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader)
    )
    # vLLM builds its models with bfloat16 as the default dtype.
    if recipe.weights == "tensor":
        scales = torch.ones(len(widths), 1, dtype=torch.float32)
        scale = PerTensorScaleParameter(data=scales, weight_loader=loader)
    else:
        scales = torch.ones(rows, 1, dtype=torch.float32)
        scale = ChannelQuantScaleParameter(data=scales, output_dim=0, weight_loader=loader)
    layer.register_parameter("weight_scale_inv", scale)
