"""Swapping a model's linear layers for FP8 ones, by one of three backends.

:func:`convert_linears` is the one entry: a filter chooses the layers, a :class:`Backend` replaces each of them.
``reference`` computes in plain torch on any device, and the other two must give its results. ``te`` and ``torch``
want libraries that a CPU does not have, so their modules are imported when their first layer is converted.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.layers.shapes import is_experts, linear_shapes, not_plain
from verl_fp8.numerics.recipe import Recipe
from verl_fp8.trainer import experts
from verl_fp8.trainer.reference import to_reference


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What computes FP8 layers.

    Attributes:
        name: the value of ``fp8.backend``.
        linear: (a plain ``nn.Linear``, recipe) -> the layer that takes its place: the same object, or a new one that
            shares its Parameter objects.
        experts: (fused experts, recipe) -> None; converts them in place.
        multiple: its kernels take (out, in) that are multiples of these; see LayerFilter.reason.
    """

    name: str
    linear: Callable[[nn.Linear, Recipe], nn.Module]
    experts: Callable[[nn.Module, Recipe], None]
    multiple: tuple[int, int] = (1, 1)


def _at_first_use(name: str, module: str, function: str, multiple: tuple[int, int]) -> Backend:
    """A backend whose module is imported with its first layer: it wants TransformerEngine, or Triton."""

    def linear(plain: nn.Linear, recipe: Recipe) -> nn.Module:
        return getattr(importlib.import_module(module), function)(plain, recipe)

    def convert_experts(fused: nn.Module, recipe: Recipe) -> None:
        importlib.import_module(module).to_experts(fused, recipe)

    return Backend(name=name, linear=linear, experts=convert_experts, multiple=multiple)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name="reference", linear=to_reference, experts=experts.to_reference),
        _at_first_use("te", "verl_fp8.trainer.te", "to_te", (16, 16)),
        _at_first_use("torch", "verl_fp8.trainer.scaled_mm", "to_scaled_mm", (1, 1)),
    )
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
    backends: Mapping[str, Backend] = BACKENDS,
) -> ConversionReport:
    """Swap every linear layer below ``module`` that the filter lets through, in place; works on the meta device.

    Only plain ``nn.Linear`` is converted: of a subclass we do not know what its forward adds. A weight that another
    module owns too (an embedding) stays, as its other use would not follow.

    Args:
        module: the model, not yet wrapped by FSDP.
        recipe: the arithmetic.
        layer_filter: which layers.
        backend: a key of ``backends``.
        backends: name -> backend.

    Raises:
        ConfigError: an unknown backend, a PEFT adapter in the model, a filter that does not fit it, or no layer to
            convert. The model is unchanged then.
    """
    if backend not in backends:
        raise ConfigError(f"fp8.backend={backend!r}", "no such backend", f"set it to one of {sorted(backends)}")
    chosen = backends[backend]
    # Under every name: a module used twice must be replaced in both places.
    modules = dict(module.named_modules(remove_duplicate=False))
    _refuse_peft(modules)
    linears = {name: m for name, m in modules.items() if name and isinstance(m, nn.Linear)}
    found = linear_shapes(module)
    converted, skipped = layer_filter.split(found, multiple=chosen.multiple, kept=not_plain(linears, modules))
    report = ConversionReport(converted, skipped, len(found))
    if not converted:
        raise ConfigError(
            asked="train linear layers in FP8 (fp8.backend, fp8.recipe)",
            found=f"nothing to convert in {type(module).__name__}: {report.summary()}",
            fix="loosen fp8.recipe.exclude, or switch FP8 off for this model",
        )
    _convert_experts(modules, converted, recipe, chosen)
    dense = [name for name in converted if name in linears]
    for original in {id(linears[name]): linears[name] for name in dense}.values():
        replacement = chosen.linear(original, recipe)
        replacement.qualified_name = next(name for name in dense if linears[name] is original)
        if replacement is original:
            continue
        for name in (n for n in dense if linears[n] is original):
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent], leaf, replacement)
    return report


def _convert_experts(
    modules: Mapping[str, nn.Module], converted: tuple[str, ...], recipe: Recipe, backend: Backend
) -> None:
    chosen = {name.partition(".experts.")[0] + ".experts" for name in converted if ".experts." in name}
    for name, m in modules.items():
        if name in chosen and is_experts(m):
            backend.experts(m, recipe)


def _refuse_peft(modules: Mapping[str, nn.Module]) -> None:
    for name, m in modules.items():
        if any(base.__module__.startswith("peft.tuners.") for base in type(m).__mro__) and "base_layer" in m._modules:
            raise ConfigError(
                asked="train linear layers in FP8 (fp8.backend, fp8.recipe)",
                found=f"a PEFT adapter, {type(m).__name__}, at {name or 'the root'}",
                fix="train without an adapter: actor_rollout_ref.model.lora_rank=0",
            )
