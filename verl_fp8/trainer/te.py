"""The ``te`` backend: TransformerEngine's linear layer and its grouped GEMM with our recipe.

No other module imports TransformerEngine. Versions 2.18 to 2.20.2 are known. This is what it does not do by itself:

* The recipe. ``Float8BlockScaling`` ignores ``use_f32_scales=True`` and the QParams given to its constructor, and takes
  its defaults from environment variables at import (common/recipe/__init__.py). So the QParams are set on the instance.
  Then everything is read back, from the recipe and from the quantisers built from it.
* Autocast. torch's non-reentrant checkpoint recomputes a layer without the autocast around it. So TransformerEngine's
  is entered inside the layer's forward.
* The dtype. TransformerEngine quantises the dtype it sees (pytorch/module/linear.py, _linear_forward_impl). So
  activations are cast as torch's autocast would cast them, and a weight of another dtype is refused.
* The bias. It is added outside the GEMM in the activation's dtype, as vLLM does.
* Tokens. Its GEMMs want multiples of 16 (pytorch/utils.py, assert_dim_for_fp8_exec). Zero rows fill up whole blocks.
* ``_extra_state``. verl's weight sync would take it for a parameter. This recipe has no state, so the key is left out.

A converted layer has the Parameter objects of the original ``nn.Linear``, under the same names. TransformerEngine
remembers at its first forward whether a layer is sharded (module/base.py, is_fsdp2). Under FSDP2 no forward may
therefore run before ``fully_shard``; nothing here runs one.

Fused experts keep their parameters too (:mod:`verl_fp8.trainer.experts`). te.GroupedLinear cannot hold them: it owns a
parameter for each expert, and keeps the codes from the forward to the backward. :class:`TeGroupedLinear` makes the same
calls on the experts' own tensor: a Float8BlockQuantizer for each expert and operand, and one ``general_grouped_gemm``
for all experts of a product. Its signature is the same in all these versions.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from verl_fp8.errors import ConfigError, ContractError, DataError
from verl_fp8.numerics.experts import spans
from verl_fp8.numerics.linear import autocast_input
from verl_fp8.numerics.recipe import GPU_BLOCK, Recipe
from verl_fp8.trainer import experts
from verl_fp8.upstream.pins import INSTALL_TRANSFORMER_ENGINE

TOKENS = 128
QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@functools.cache
def transformer_engine() -> ModuleType:
    """``transformer_engine.pytorch``.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            "fp8.backend=te",
            f"TransformerEngine does not load: {type(error).__name__}: {said}",
            f"{INSTALL_TRANSFORMER_ENGINE} for this torch and CUDA, or set fp8.backend=torch (Hopper)",
        ) from error
    return te


def te_settings(recipe: Recipe) -> dict[str, Any]:
    """What :func:`te_recipe` sets, by the names of ``Float8BlockScaling`` and ``QParams``; plain, without
    TransformerEngine."""
    return {
        "fp8_format": recipe.fmt.upper(),
        "backward_override": None if recipe.backward == "fp8" else recipe.backward,
        "power_2_scale": recipe.scale_format == "pow2",
        "amax_epsilon": recipe.eps,
    }


def te_recipe(recipe: Recipe) -> Any:
    """TransformerEngine's ``Float8BlockScaling`` for a recipe of ours.

    Raises:
        ConfigError: blocks TransformerEngine has not.
        ContractError: the object does not say what was asked of it.
    """
    transformer_engine()
    from transformer_engine.common.recipe import Float8BlockScaling, Format, QParams

    if recipe.weight_block != GPU_BLOCK:
        raise ConfigError(
            f"fp8.backend=te with fp8.recipe.weight_block={list(recipe.weight_block)}",
            "TransformerEngine's blocks are 128x128",
            "set fp8.recipe.weight_block=[128,128]",
        )
    settings = te_settings(recipe)
    fmt, override = Format[settings["fp8_format"]], settings["backward_override"]
    # Explicit, since the defaults come from the environment (NVTE_BACKWARD_OVERRIDE,
    # NVTE_FP8_BLOCK_SCALING_FP32_SCALES).
    built = Float8BlockScaling(fp8_format=fmt, backward_override=override)
    params = QParams(power_2_scale=settings["power_2_scale"], amax_epsilon=settings["amax_epsilon"])
    for name in QPARAMS:
        setattr(built, name, params)
    check_te_recipe(built, recipe)
    return built


def check_te_recipe(built: Any, recipe: Recipe) -> None:
    """Compare a recipe of TransformerEngine's, whoever built it, with ours.

    Raises:
        ContractError: the first difference.
    """
    transformer_engine()
    from transformer_engine.common.recipe import Float8BlockScaling, Format, MMParams, QParams

    settings = te_settings(recipe)
    if not isinstance(built, Float8BlockScaling):
        raise ContractError(
            "TransformerEngine's Float8BlockScaling", f"{type(built).__name__}", "set fp8_recipe=blockwise"
        )
    fmt, override = Format[settings["fp8_format"]], settings["backward_override"]
    params = QParams(power_2_scale=settings["power_2_scale"], amax_epsilon=settings["amax_epsilon"])
    wanted = {
        **dict.fromkeys(QPARAMS, params),
        "fp8_format": fmt,
        "backward_override": override,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        **dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), MMParams(use_split_accumulator=True)),
    }
    for name, value in wanted.items():
        if getattr(built, name, None) != value:
            raise ContractError(
                f"Float8BlockScaling.{name}={value}", f"{getattr(built, name, None)}", "report the version"
            )


def is_te_module(module: nn.Module) -> bool:
    """Whether a module's GEMMs are TransformerEngine's."""
    transformer_engine()
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return isinstance(module, TransformerEngineBaseModule)


@functools.cache
def linear_class() -> type:
    """``te.Linear`` with the conditions of this module's docstring."""

    class TeFp8Linear(transformer_engine().Linear):
        """A linear layer whose three GEMMs TransformerEngine runs in FP8.

        Attributes:
            recipe: our :class:`~verl_fp8.numerics.recipe.Recipe`.
            te_recipe: TransformerEngine's, from :func:`te_recipe`.
        """

        # As nn.Module has them: torch then neither saves nor expects an extra state.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[..., K] -> [..., N] in x's dtype, or autocast's where that is on.

            Raises:
                DataError: the weight has another dtype than the activation.
                ContractError: at the first call, if TransformerEngine's quantisers are not the recipe's.
            """
            x = autocast_input(x)
            if self.weight.dtype != x.dtype:
                raise DataError(
                    f"an FP8 GEMM of {x.dtype} activations",
                    f"a {self.weight.dtype} weight, whose codes would not be those of {x.dtype}",
                    "shard with FSDP2 and actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
                )
            flat = x.reshape(-1, self.in_features)
            tokens = flat.shape[0]
            missing = -tokens % TOKENS
            if missing:
                flat = nn.functional.pad(flat, (0, 0, 0, missing))
            with transformer_engine().autocast(enabled=True, recipe=self.te_recipe):
                y = super().forward(flat)
            if not self.quantizers_checked:
                check_quantizers(self)
            y = y[:tokens].reshape(*x.shape[:-1], self.out_features)
            bias = self._parameters.get("bias")
            return y if bias is None else y + bias.to(y.dtype)

        def extra_repr(self) -> str:
            """As ``nn.Linear``'s, with the recipe."""
            bias = self._parameters.get("bias") is not None
            return (
                f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, fp8={self.recipe.digest()}"
            )

    return TeFp8Linear


def check_quantizers(layer: nn.Module) -> None:
    """Compare the quantisers TransformerEngine built at the first forward with the recipe.

    Raises:
        ContractError: names the operand.
    """
    from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx

    recipe = layer.recipe
    forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
    quantizers = {
        "activation": (forward[FP8FwdTensorIdx.GEMM1_INPUT], 1),
        "weight": (forward[FP8FwdTensorIdx.GEMM1_WEIGHT], 2),
        "gradient": (backward[FP8BwdTensorIdx.GRAD_OUTPUT1], 1),
    }
    for operand, (quantizer, dimensions) in quantizers.items():
        found = (quantizer.block_len, quantizer.block_scaling_dim, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        wanted = (recipe.weight_block[1], dimensions, recipe.scale_format == "pow2", recipe.eps)
        if found != wanted:
            names = "(block_len, block_scaling_dim, force_pow_2_scales, amax_epsilon)"
            raise ContractError(
                f"{operand} quantiser {names}={wanted}", str(found), "report the TransformerEngine version"
            )
    layer.quantizers_checked = True


def to_te(linear: nn.Linear, recipe: Recipe) -> nn.Module:
    """A TransformerEngine layer in place of a plain ``nn.Linear``: the same Parameter objects, names, mode and device.

    Raises:
        ConfigError: no TransformerEngine, or a recipe it has not.
    """
    built = te_recipe(recipe)
    # Built on meta: its own parameters are dropped at once.
    layer = linear_class()(
        linear.in_features, linear.out_features, bias=False, params_dtype=linear.weight.dtype, device="meta"
    )
    layer.recipe, layer.te_recipe, layer.quantizers_checked = recipe, built, False
    layer.weight = linear.weight
    del layer.bias  # without a bias te.Linear keeps an empty tensor under that name
    layer.register_parameter("bias", linear.bias)
    layer.train(linear.training)
    return layer


def to_experts(module: nn.Module, recipe: Recipe) -> None:
    """Let fused experts (:mod:`verl_fp8.trainer.experts`) compute by TransformerEngine's grouped GEMM.

    Raises:
        ConfigError: as :func:`to_te`; the experts' width is no multiple of the block's rows.
    """
    te_recipe(recipe)
    experts.to_fp8(module, recipe, grouped_linear, TOKENS)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], recipe: Recipe) -> torch.Tensor:
    """The :data:`~verl_fp8.trainer.experts.GroupedLinear` of this backend; each count is a multiple of TOKENS, their
    sum x's rows."""
    return TeGroupedLinear.apply(x, weight, counts, recipe)


class TeGroupedLinear(torch.autograd.Function):
    """One FP8 linear layer an expert, each product one grouped GEMM over the experts that have tokens.

    x: [sum of counts, K]; weight: [experts, N, K]; one dtype. Operands and ``backward`` modes are those of
    :class:`~verl_fp8.numerics.linear.Fp8LinearFunction`. The weight's codes live in one product only: FSDP2 frees the
    gathered weight after the forward and gathers it anew, so the backward quantises it again.
    """

    @staticmethod
    def forward(ctx, x, weight, counts, recipe):
        from transformer_engine.pytorch.quantized_tensor import prepare_for_saving

        dx_wanted, dw_wanted = ctx.needs_input_grad[:2]
        ctx.recipe, ctx.shapes = recipe, (x.shape, weight.shape)
        ctx.spans = list(spans(counts))
        ctx.dx_wanted, ctx.dw_wanted = dx_wanted, dw_wanted
        y = x.new_empty(x.shape[0], weight.shape[1])
        if not ctx.spans:
            return y
        fp8 = recipe.backward == "fp8"
        quantizer = _quantizer(recipe, 1, columnwise=dw_wanted and fp8)
        codes = [quantizer(x[rows]) for _, rows in ctx.spans]
        _grouped_gemm("TN", _quantized(weight, ctx.spans, recipe), codes, [y], ctx.spans)
        kept = []
        if dw_wanted:
            # high_precision: the activation itself; dequantized: its codes; fp8: those along the tokens.
            kept = [x] if recipe.backward == "high_precision" else codes
            for operand in codes:
                operand.update_usage(rowwise_usage=not fp8, columnwise_usage=fp8)
        tensors, ctx.tensor_objects = prepare_for_saving(weight if dx_wanted else None, *kept)
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        from transformer_engine.pytorch.quantized_tensor import restore_from_func_ctx

        (x_shape, w_shape), recipe, spans = ctx.shapes, ctx.recipe, ctx.spans
        dx = dy.new_empty(x_shape) if ctx.dx_wanted else None
        dw = dy.new_zeros(w_shape) if ctx.dw_wanted else None
        if not spans:
            return dx, dw, None, None
        weight, *kept = restore_from_func_ctx(ctx)
        dy = dy.contiguous()
        if recipe.backward == "fp8":
            quantizer = _quantizer(recipe, 1, columnwise=dw is not None)
            gradients = [quantizer(dy[rows]) for _, rows in spans]
        else:
            gradients = [dy[rows] for _, rows in spans]
        if dx is not None:
            if recipe.backward == "fp8":
                weights = _quantized(weight, spans, recipe, columnwise=True)
            elif recipe.backward == "dequantized":
                weights = [q.dequantize(dtype=dy.dtype) for q in _quantized(weight, spans, recipe)]
            else:
                weights = [weight[expert] for expert, _ in spans]
            _grouped_gemm("NN", weights, gradients, [dx], spans)
        if dw is not None:
            if recipe.backward == "dequantized":
                kept = [q.dequantize(dtype=dy.dtype) for q in kept]
            elif recipe.backward == "high_precision":
                kept = [kept[0][rows] for _, rows in spans]
            _grouped_gemm("NT", kept, gradients, [dw[expert] for expert, _ in spans], spans)
        return dx, dw, None, None


def _quantizer(recipe: Recipe, dimensions: int, *, columnwise: bool) -> Any:
    """TransformerEngine's quantiser: 1x128 (``dimensions`` 1) or 128x128 (2), of the matrix and, if wanted, its
    transpose."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=True,
        columnwise=columnwise,
        amax_epsilon=recipe.eps,
        force_pow_2_scales=recipe.scale_format == "pow2",
        block_scaling_dim=dimensions,
    )
    quantizer.internal = True  # plain storage for its GEMM, no tensor subclass
    return quantizer


def _quantized(weight: torch.Tensor, spans: Sequence, recipe: Recipe, *, columnwise: bool = False) -> list:
    quantizer = _quantizer(recipe, 2, columnwise=columnwise)
    return [quantizer(weight[expert]) for expert, _ in spans]


def _grouped_gemm(layout: str, a: list, b: list, out: list[torch.Tensor], spans: Sequence) -> None:
    """TransformerEngine's products: TN y = x W.T, NN dx = dy W (into one tensor, rows of each expert), NT dW = dy.T
    x."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    general_grouped_gemm(
        a,
        b,
        out,
        quantization_params=[None] * len(a),
        out_dtype=out[0].dtype,
        layout=layout,
        m_splits=[rows.stop - rows.start for _, rows in spans],
        grad=layout != "TN",
        use_split_accumulator=True,
        single_output=layout != "NT",
    )
