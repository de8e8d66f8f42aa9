"""What the model's own layers allow: which can be FP8, how they may be divided, and what the modes ask of them."""

from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_fp8.rollout.arguments import fp8_arguments
from verl_fp8.rules.asked import Run
from verl_fp8.rules.megatron import layers_are_megatrons
from verl_fp8.rules.refuse import Key, Refusal, caught, get, number, off, refusal, table
from verl_fp8.rules.tensor_parallel import check_tensor_parallel
from verl_fp8.switches.settings import Fp8Settings
from verl_fp8.trainer.exact import check_config

_ROLLOUT = "actor_rollout_ref.rollout"
_TP = f"{_ROLLOUT}.tensor_model_parallel_size"
_EP = f"{_ROLLOUT}.expert_parallel_size"


def the_model_is_bf16(run: Run) -> Iterator[Refusal]:
    """There is a model configuration to be read, of a model that nobody has quantised yet."""
    if getattr(run.hf_config, "quantization_config", None):
        path = f"actor_rollout_ref.model.{run.model_key}"
        yield Refusal(
            f"FP8 training of the bf16 model at {path}={run.plain('rollout.fp8_model')[run.model_key]}",
            "an already quantised one (quantization_config in its configuration)",
            f"set {path} to the unquantised model",
        )


def the_layers_take_the_recipe(run: Run) -> Iterator[Refusal]:
    """Some layer is FP8, and experts have block scales."""
    experts = next((name for name in run.layers.converted if ".experts." in name), None)
    if run.fp8.recipe.weights != "block" and experts is not None:
        fix = "keep the experts in bf16: fp8.recipe.exclude=['*.mlp.experts.*'], or set fp8.recipe.weights=block"
        found = f"{experts}: experts are quantised in blocks only"
        yield Refusal(f"fp8.recipe.weights={run.fp8.recipe.weights}", found, fix)


def tensor_parallelism_is_a_number(run: Run) -> Iterator[Refusal]:
    """``rollout.tensor_model_parallel_size`` is a positive whole number."""
    if not _whole(get(run.config, _TP, 1)):
        why = ", not a positive whole number"
        yield refusal(run.config, "+fp8 with tensor parallelism", _TP, why, "set {path} to one")


def _whole(value: object) -> bool:
    return type(value) is int and value >= 1


def bf16_asks_for_no_fp8(run: Run) -> Iterator[Refusal]:
    """``+fp8=bf16``: the keys that describe FP8 layers would do nothing, so each is at its default."""
    if run.fp8.layer_filter is not None:
        return
    fp8, plain = run.fp8, Fp8Settings(mode="bf16")
    recipe, ours = fp8.recipe.to_dict(), plain.recipe.to_dict()
    keys = {f"recipe.{k}": (getattr(fp8.recipe, k), getattr(plain.recipe, k)) for k in ("weights", "activations")}
    keys |= {f"recipe.{k}": (v, ours[k]) for k, v in recipe.items() if k != "scale_format" and k in ours}
    keys |= {"recipe.exclude": (fp8.layers.exclude, ()), "recipe.scale_format": (fp8.scale_format, "auto")}
    keys |= {k: (getattr(fp8, k), getattr(plain, k)) for k in ("backend", "rollout_kernel", "weight_sync")}
    for key, (found, default) in keys.items():
        if found != default:
            fix = f"remove fp8.{key}, or use +fp8=unified"
            yield Refusal("+fp8=bf16, which has no FP8 layer", f"fp8.{key}={found}", fix)


_REPLACED = ", which replaces operations the exact mode defines"
_EXACT = (
    Key(_TP, (1,), ": partial sums would be rounded between ranks", "set {path}=1", default=1),
    Key("actor_rollout_ref.model.use_liger", off, _REPLACED, "set {path}=false"),
    Key("actor_rollout_ref.model.use_fused_kernels", off, _REPLACED, "set {path}=false"),
)


def exact_is_defined(run: Run) -> Iterator[Refusal]:
    """``fp8.exact``: every operation of the model has one definition, and both sides run it on one rank."""
    if not run.fp8.exact:
        return
    asked, fp8 = "fp8.exact=true", run.fp8
    yield from caught(check_config, run.hf_config)
    if fp8.mode != "unified":
        yield Refusal(asked, f"fp8.mode={fp8.mode}: a bf16 trainer has other roundings", "use +fp8=unified")
    if fp8.backend not in ("auto", "reference"):
        yield Refusal(asked, f"fp8.backend={fp8.backend}", "set fp8.backend=reference")
    yield from table(run.config, asked, _EXACT)


def the_layers_divide(run: Run) -> Iterator[Refusal]:
    """Experts over all ranks or none, and blocks that fall on vLLM's cuts."""
    tp = get(run.config, _TP, 1)
    if not _whole(tp):
        return
    # verl passes it on as vLLM's --enable-expert-parallel, over all ranks; its own dataclass asserts the product in a
    # worker.
    whole, ranks = number(run.config, _EP, 1) > 1, tp * number(run.config, f"{_ROLLOUT}.data_parallel_size", 1)
    if whole and get(run.config, _EP) != ranks:
        why = f", beside {ranks} ranks of one rollout (tensor times data parallel)"
        yield refusal(run.config, "+fp8 with expert parallelism", _EP, why, f"set {{path}}={ranks}, or 1")
    layers, block = run.layers, run.fp8.recipe.weight_block
    divided = (layers.hf_config, layers.shapes, layers.converted, block, tp)
    yield from caught(check_tensor_parallel, *divided, expert_parallel=whole)


def vllm_takes_the_arguments(run: Run) -> Iterator[Refusal]:
    """The user's arguments of vLLM leave room for the recipe's."""
    node, fp8 = run.plain("rollout.fp8_model"), OmegaConf.to_container(run.config.fp8, resolve=True)
    yield from caught(fp8_arguments, fp8, node, run.plain("rollout.engine_kwargs.vllm"))


RULES = (
    the_model_is_bf16,
    the_layers_take_the_recipe,
    tensor_parallelism_is_a_number,
    bf16_asks_for_no_fp8,
    exact_is_defined,
    the_layers_divide,
    layers_are_megatrons,
    vllm_takes_the_arguments,
)
