"""Swapping a model's linear layers for FP8 ones, and the reference FP8 layer.

``convert_linears(module, recipe, layer_filter, backend)`` is the one entry. The reference backend computes with
:mod:`verl_fp8.numerics` on any device; it defines what the other backends must reproduce.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from verl_fp8 import experts
from verl_fp8.errors import ConfigError, DataError
from verl_fp8.numerics import Fp8LinearFunction
from verl_fp8.recipe import LayerFilter, Recipe, is_router


class ReferenceFp8Linear(nn.Linear):
    """A linear layer whose three GEMMs run on FP8 codes, in plain torch.

    It stays an ``nn.Linear`` with the same parameters, so state-dict keys, initialisation, FSDP wrapping and LoRA
    target matching see no difference. The weight is quantised at every call: under FSDP2 each gathered weight is a
    fresh tensor, and one address and version may hold two different contents, so nothing can key a cache.

    Attributes:
        recipe: the :class:`~verl_fp8.recipe.Recipe`, set by :func:`to_reference`.
        accumulate: of the forward GEMM; float64 in the exact mode (verl_fp8.exact_hf).
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
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            # What autocast does to nn.functional.linear; our autograd function it does not know.
            x = x.to(torch.get_autocast_dtype(kind))
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


to_reference.experts = experts.to_reference

# Name -> (linear, recipe) -> its replacement, the same object or a new one that shares the Parameter objects. A backend
# whose kernels need (out, in) to be multiples of something says so in an attribute `multiple`, see LayerFilter.reason; its
# attribute `experts`, (experts module, recipe) -> None, converts fused experts.
# Imported at first use: their modules want TransformerEngine, or Triton.
def _at_first_use(module: str, function: str, multiple: tuple[int, int]) -> Callable[[nn.Linear, Recipe], nn.Module]:
    def convert(linear: nn.Linear, recipe: Recipe) -> nn.Module:
        return getattr(importlib.import_module(module), function)(linear, recipe)

    def convert_experts(fused: nn.Module, recipe: Recipe) -> None:
        importlib.import_module(module).to_experts(fused, recipe)

    convert.multiple, convert.experts = multiple, convert_experts
    return convert


BACKENDS: dict[str, Callable[[nn.Linear, Recipe], nn.Module]] = {
    "reference": to_reference,
    "te": _at_first_use("verl_fp8.te", "to_te", (16, 16)),
    "torch": _at_first_use("verl_fp8.scaled_mm", "to_scaled_mm", (1, 1)),
}


@dataclass(frozen=True)
class ConversionReport:
    """What became FP8 and what did not.

    Attributes:
        converted: fully qualified names, in model order.
        skipped: name -> why it stays in high precision.
        total: all linear layers found, each projection of each expert counted.
    """

    converted: tuple[str, ...]
    skipped: dict[str, str]
    total: int

    def summary(self) -> str:
        """One line: ``FP8: converted 14 of 15 linear layers (1 kept: lm_head (output head))``, reasons with counts."""
        line = f"FP8: converted {len(self.converted)} of {self.total} linear layers"
        leaves = Counter((name.rpartition(".")[2], reason) for name, reason in self.skipped.items())
        kept = "; ".join(f"{count} kept: {leaf} ({reason})" for (leaf, reason), count in leaves.items())
        return f"{line} ({kept})" if kept else line


def convert_linears(
    module: nn.Module,
    recipe: Recipe,
    layer_filter: LayerFilter,
    backend: str = "reference",
    backends: Mapping[str, Callable[[nn.Linear, Recipe], nn.Module]] = BACKENDS,
) -> ConversionReport:
    """Swap every linear layer below ``module`` that the filter lets through, in place; works on the meta device.

    Only plain ``nn.Linear`` is converted: of a subclass we do not know what its forward adds. A weight that another
    module owns too (an embedding) stays, as its other use would not follow.

    Args:
        module: the model, not yet wrapped by FSDP.
        recipe: the arithmetic.
        layer_filter: which layers.
        backend: a key of ``backends``.
        backends: the registry.

    Raises:
        ConfigError: an unknown backend, a PEFT adapter in the model, a filter that does not fit it, or no layer to
            convert. The model is unchanged then.
    """
    if backend not in backends:
        raise ConfigError(f"fp8.backend={backend!r}", "no such backend", f"set it to one of {sorted(backends)}")
    convert = backends[backend]
    # Under every name: a module used twice must be replaced in both places.
    modules = dict(module.named_modules(remove_duplicate=False))
    _refuse_peft(modules)
    linears = {name: m for name, m in modules.items() if name and isinstance(m, nn.Linear)}
    shapes = linear_shapes(module)
    converted, skipped = layer_filter.split(
        shapes, multiple=getattr(convert, "multiple", (1, 1)), kept=_not_ours(linears, modules)
    )
    report = ConversionReport(converted, skipped, len(shapes))
    if not converted:
        raise ConfigError(
            asked="train linear layers in FP8 (fp8.backend, fp8.recipe)",
            found=f"nothing to convert in {type(module).__name__}: {report.summary()}",
            fix="loosen fp8.recipe.exclude, or switch FP8 off for this model",
        )
    _convert_experts(modules, converted, recipe, convert)
    dense = [name for name in converted if name in linears]
    for original in {id(linears[name]): linears[name] for name in dense}.values():
        replacement = convert(original, recipe)
        replacement.qualified_name = next(name for name in dense if linears[name] is original)
        if replacement is original:
            continue
        for name in (n for n in dense if linears[n] is original):
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent], leaf, replacement)
    return report


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of every linear layer below ``module``, in module order.

    Those are the ``nn.Linear``, the projections of fused experts under the checkpoint's names, and routers, which
    transformers writes as modules of their own and vLLM as linear layers.

    Raises:
        ConfigError: fused experts in an unknown layout.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, m in module.named_modules(remove_duplicate=False):
        weight = m._parameters.get("weight")
        if experts.is_experts(m):
            shapes |= experts.expert_shapes(name, m)
        elif name and (isinstance(m, nn.Linear) or (is_router(name) and weight is not None and weight.ndim == 2)):
            shapes[name] = tuple(weight.shape)
        elif fused := [n for n, p in m._parameters.items() if p is not None and p.ndim == 3 and "experts" in name.split(".")]:
            raise ConfigError(
                "FP8 linear layers in trainer and rollout (+fp8)",
                f"experts in one tensor, {name}.{fused[0]}, in a layout this package does not know",
                "use a model with Qwen3-MoE's layout of experts, or remove +fp8",
            )
    return shapes


def _convert_experts(modules: Mapping[str, nn.Module], converted: tuple[str, ...], recipe: Recipe, convert: Callable) -> None:
    chosen = {name.partition(".experts.")[0] + ".experts" for name in converted if ".experts." in name}
    for name, m in modules.items():
        if name in chosen and experts.is_experts(m):
            convert.experts(m, recipe)


def _not_ours(linears: Mapping[str, nn.Linear], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name -> reason for the linear layers no filter may choose."""
    owners: dict[int, dict[int, str]] = {}
    for name, owner in modules.items():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(id(parameter), {})[id(owner)] = name
    reasons = {}
    for name, linear in linears.items():
        others = [other for owner, other in owners[id(linear.weight)].items() if owner != id(linear)]
        if type(linear) is not nn.Linear:
            reasons[name] = f"not a plain nn.Linear but {type(linear).__name__}"
        elif others:
            reasons[name] = f"weight tied to {others[0]}"
    return reasons


def _refuse_peft(modules: Mapping[str, nn.Module]) -> None:
    for name, m in modules.items():
        if any(base.__module__.startswith("peft.tuners.") for base in type(m).__mro__) and "base_layer" in m._modules:
            raise ConfigError(
                asked="train linear layers in FP8 (fp8.backend, fp8.recipe)",
                found=f"a PEFT adapter, {type(m).__name__}, at {name or 'the root'}",
                fix="train without an adapter: actor_rollout_ref.model.lora_rank=0",
            )
