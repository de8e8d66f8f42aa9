"""The ``reference`` backend's linear layer: any device, bit for bit the arithmetic of
:mod:`verl_fp8.numerics.quantize`."""

import torch
from torch import nn

from verl_fp8.errors import DataError
from verl_fp8.numerics.linear import Fp8LinearFunction, autocast_input
from verl_fp8.numerics.recipe import Recipe


class ReferenceFp8Linear(nn.Linear):
    """A linear layer whose three GEMMs run on FP8 codes, in plain torch.

    It stays an ``nn.Linear`` with the same parameters, so state-dict keys, initialisation, FSDP wrapping and LoRA
    target matching see no difference. The weight is quantised at every call: under FSDP2 each gathered weight is a
    fresh tensor, and one address and version may hold two different contents, so nothing can key a cache.

    Attributes:
        recipe: the :class:`~verl_fp8.numerics.recipe.Recipe`, set by :func:`to_reference`.
        accumulate: of the forward GEMM; float64 in the exact mode (verl_fp8.trainer.exact).
        qualified_name: in the model, for errors; set by :func:`convert_linears`.
    """

    recipe: Recipe
    qualified_name: str = "an FP8 linear layer"
    accumulate: torch.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in x's dtype, or autocast's where that is on.

        Raises:
            DataError: the weight holds infinity or NaN; names the layer.
        """
        x = autocast_input(x)
        # FP8 codes of a bf16 weight and of its float32 master differ in 2 %: quantise the dtype the GEMM would see.
        weight = self.weight.to(x.dtype)
        try:
            y = Fp8LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, self.recipe, self.accumulate)
        except DataError as error:
            raise DataError(f"{self.qualified_name}: {error.asked}", error.found, error.fix) from error
        y = y.reshape(*x.shape[:-1], self.out_features)
        # Outside the GEMM, after its rounding, as vLLM and the TransformerEngine backend do.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """nn.Linear's, with the recipe."""
        return f"{super().extra_repr()}, fp8={self.recipe.digest()}"


def to_reference(linear: nn.Linear, recipe: Recipe) -> nn.Linear:
    """Turn a plain ``nn.Linear`` into a :class:`ReferenceFp8Linear` in place: parameters, hooks and mode stay."""
    linear.__class__ = ReferenceFp8Linear
    linear.recipe = recipe
    return linear
