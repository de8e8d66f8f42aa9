"""What TransformerEngine reads from the environment under Megatron."""

from verl_fp8.switches.settings import Fp8Settings

ASKED = "+fp8=unified_megatron"

SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
BACKWARD_VARIABLE = "NVTE_BACKWARD_OVERRIDE"


def environment(fp8: Fp8Settings) -> dict[str, str]:
    """The variables Megatron's workers need before TransformerEngine is imported (its common/recipe/__init__.py)."""
    variables = {SCALES_VARIABLE: "1" if fp8.recipe.scale_format == "fp32" else "0"}
    if fp8.recipe.backward != "fp8":
        variables[BACKWARD_VARIABLE] = fp8.recipe.backward
    return variables
