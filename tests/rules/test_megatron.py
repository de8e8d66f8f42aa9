"""``+fp8=unified_megatron``: what verl's Megatron engine must be told, and which shards and bf16 layers it can have."""

import copy
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.driver import compose, refusal, start
from tests.rules.lines import ENV, JOB, REF, A, M, R, said
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.rules.megatron import bf16_layers, check_blocks
from verl_fp8.rules.run import prepare
from verl_fp8.switches.hardware import Hardware, assume

H100 = Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")

# Beside `model_engine=megatron +fp8=unified_megatron` on H100s: (path, value, what the message must name).
T = f"{A}.megatron.override_transformer_config"
MEGATRON = [
    ("fp8.exact", True, "fp8.exact"),
    ("fp8.backend", "torch", "fp8.backend"),
    ("fp8.backend", "reference", "fp8.backend"),
    ("fp8.lm_head", "fp32", "fp8.lm_head"),
    ("fp8.recipe.weight_block", [64, 64], "fp8.recipe.weight_block"),
    ("fp8.recipe.eps", 0.1, "fp8.recipe.eps"),
    ("fp8.recipe.exclude", ["*.self_attn.*"], "fp8.recipe.exclude"),
    ("fp8.recipe.exclude", ["*.gate_proj", "*.up_proj"], "fp8.recipe.exclude"),
    ("trainer.device", "cpu", "trainer.device=cpu"),
    ("model_engine", "dp", "model_engine=megatron"),
    ("model_engine", "veomni", "model_engine"),
    (f"{A}.strategy", "fsdp2", f"{A}.strategy"),
    (f"{REF}.strategy", "fsdp2", f"{REF}.strategy"),
    (f"{A}.megatron._target_", "verl.workers.config.McoreEngineConfig", f"{A}.megatron._target_"),
    (f"{REF}.megatron._target_", "verl.workers.config.McoreEngineConfig", f"{REF}.megatron._target_"),
    (f"{A}.megatron.fp8", None, f"{A}.megatron.fp8"),
    (f"{REF}.megatron.fp8", {"mode": "unified"}, f"{REF}.megatron.fp8"),
    (f"{A}.megatron.use_mbridge", False, f"{A}.megatron.use_mbridge"),
    (f"{A}.megatron.vanilla_mbridge", True, f"{A}.megatron.vanilla_mbridge"),
    (f"{REF}.megatron.vanilla_mbridge", True, f"{REF}.megatron.vanilla_mbridge"),
    (f"{A}.megatron.use_megatron_fsdp", True, f"{A}.megatron.use_megatron_fsdp"),
    (f"{A}.megatron.dynamic_context_parallel", True, f"{A}.megatron.dynamic_context_parallel"),
    (f"{A}.megatron.dtype", "float16", f"{A}.megatron.dtype"),
    (f"{A}.megatron.qat.enable", True, f"{A}.megatron.qat.enable"),
    (f"{A}.megatron.tensor_model_parallel_size", 4, f"{A}.megatron.tensor_model_parallel_size"),
    (f"{T}.fp8", "hybrid", f"{T}.fp8"),
    (f"{T}.fp8", None, f"{T}.fp8"),
    (f"{T}.fp8_recipe", "delayed", f"{T}.fp8_recipe"),
    (f"{T}.fp8_param", True, f"{T}.fp8_param"),
    (f"{T}.fp8_wgrad", False, f"{T}.fp8_wgrad"),
    (f"{T}.fp4", "e2m1", f"{T}.fp4"),
    (f"{T}.quant_recipe", "mine", f"{T}.quant_recipe"),
    (f"{T}.bf16", False, f"{T}.bf16"),
    (f"{T}.first_last_layers_bf16", True, "fp8.recipe.exclude"),
    (f"{REF}.megatron.override_transformer_config", {}, f"{REF}.megatron.override_transformer_config.fp8"),
    (f"{A}.optim.override_optimizer_config.fp8_recipe", "mxfp8", "override_optimizer_config.fp8_recipe"),
    (f"{ENV}.NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
    (f"{ENV}.NVTE_BACKWARD_OVERRIDE", "dequantized", "NVTE_BACKWARD_OVERRIDE"),
    (f"{M}.lora.rank", 8, f"{M}.lora.rank"),
    (f"{R}.quantization", None, f"{R}.quantization"),
]

# What is wrong with the machine -> what the message must name.
MEGATRON_MACHINES = [
    (Hardware((9, 0), (13, 0), "2.20.2", None), "megatron-core is not installed"),
    (Hardware((9, 0), (13, 0), "2.20.2", "0.15.3"), "megatron-core 0.15.3"),
    (Hardware((9, 0), (13, 0), None, "0.19.2"), "TransformerEngine is not installed"),
    (Hardware((9, 0), (12, 8), "2.20.2", "0.19.2"), "CUDA 12.8"),
    (Hardware((8, 0), (13, 0), "2.20.2", "0.19.2"), "8.0"),
    (Hardware(), "fp8.recipe.scale_format=fp32"),
]


def test_a_correction_runs_on_megatron_too(tiny_model):
    """AIS lives on the driver, so it takes verl's Megatron actor; the FSDP2 modes name the one for Megatron."""
    job = [o for o in JOB if not o.startswith(f"{A}.strategy")]
    assert said(tiny_model, [*job, "model_engine=megatron", "+is_correction=ais"], config_name="ppo_trainer") is None
    for name, engine in (("ppo_trainer", ["model_engine=megatron"]), ("ppo_megatron_trainer", [])):
        message = said(tiny_model, [*job, *engine, "+fp8=unified"], config_name=name)
        assert "model_engine=megatron" in message and "+fp8=unified_megatron" in message
    message = said(tiny_model, [*JOB, "+fp8=unified_megatron"], config_name="ppo_trainer")
    assert "model_engine=dp" in message and "set model_engine=megatron" in message


@pytest.fixture(scope="module")
def megatron_job(tiny_model):
    """A Megatron job with both switches, composed once; tests change copies."""
    job = [o for o in JOB if not o.startswith(f"{A}.strategy")]
    line = [
        *job,
        "model_engine=megatron",
        "+fp8=unified_megatron",
        "+is_correction=ais",
        f"{R}.tensor_model_parallel_size=1",
    ]
    return compose(f"{M}.path={tiny_model}", *line, config_name="ppo_trainer")


def changed(job, path=None, value=None):
    """A copy of the configuration with one value changed, as an override on the command line would."""
    job = copy.deepcopy(job)
    if path is not None:
        OmegaConf.update(job, path, value, merge=False, force_add=True)
    return job


def test_a_megatron_job_needs_only_the_switches(megatron_job):
    """verl's driver takes it. Recipe and backward reach the workers' environment, bf16 layers Megatron's keys."""
    with assume(H100):
        assert refusal(start, job := changed(megatron_job)) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "1"
        assert "first_last_layers_bf16" not in OmegaConf.select(job, T)
        assert refusal(prepare, job) is None  # what the first pass wrote, the second accepts
        assert refusal(prepare, job := changed(megatron_job, "fp8.recipe.exclude", ["model.layers.1.*"])) is None
        for node in (OmegaConf.select(job, T), job.actor_rollout_ref.ref.megatron.override_transformer_config):
            assert node.first_last_layers_bf16
            assert (node.num_layers_at_start_in_bf16, node.num_layers_at_end_in_bf16) == (0, 1)
        job = changed(
            changed(megatron_job, "fp8.recipe.exclude", ["model.layers.0.*"]),
            f"{A}.megatron.pipeline_model_parallel_size",
            4,
        )
        assert "pipeline_model_parallel_size" in refusal(prepare, job)
        assert refusal(prepare, job := changed(megatron_job, "fp8.recipe.backward", "high_precision")) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_BACKWARD_OVERRIDE == "high_precision"
    with assume(Hardware((10, 0), (13, 0), "2.20.2", "0.19.2")):
        assert refusal(prepare, job := changed(megatron_job)) is None
        assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "0"
    # A driver without a GPU, told the format.
    assert refusal(prepare, job := changed(megatron_job, "fp8.recipe.scale_format", "fp32")) is None
    assert job.ray_kwargs.ray_init.runtime_env.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES == "1"


@pytest.mark.parametrize(("path", "value", "named"), MEGATRON, ids=lambda v: str(v))
def test_a_wrong_megatron_job_is_refused_by_name(megatron_job, path, value, named):
    """One value of the Megatron job is wrong: the run does not start, and the sentence names the key."""
    with assume(H100):
        message = refusal(prepare, changed(megatron_job, path, value))
    assert message is not None and named in message


@pytest.mark.parametrize(("machine", "named"), MEGATRON_MACHINES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_megatron_job_is_refused_on_a_machine_that_cannot(megatron_job, machine, named):
    """A GPU, CUDA, TransformerEngine or Megatron that will not do, or a driver that cannot tell the scale format."""
    with assume(machine):
        message = refusal(prepare, changed(megatron_job))
    assert message is not None and named in message and "+fp8=unified_megatron" in message


@pytest.mark.parametrize(
    ("shape", "node", "named"),
    [
        ({}, {}, None),
        ({}, {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, None),
        ({}, {"tensor_model_parallel_size": 4},
         "expert_tensor_parallel_size=4; found: model.layers.0.mlp.experts.0.gate"),
        ({}, {"tensor_model_parallel_size": 8}, "4 key and value heads"),
        ({"head_dim": 64}, {}, "heads of 64"),
        ({"moe_intermediate_size": 704}, {}, "704"),
        ({"hidden_size": 2056}, {}, "multiples of 16"),
        ({"model_type": "deepseek_v3"}, {}, "a deepseek_v3 model"),
    ],
)  # fmt: skip
def test_blocks_must_fall_on_megatrons_shards(shape, node, named):
    """By Qwen3-30B-A3B's sizes: experts of 768 divide by tensor parallelism into whole blocks or not at all."""
    config = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
              "head_dim": 128, "moe_intermediate_size": 768, **shape}  # fmt: skip
    hidden, heads, expert = config["hidden_size"], 32 * config["head_dim"], config["moe_intermediate_size"]
    layer = "model.layers.0"
    shapes = {f"{layer}.self_attn.q_proj": (heads, hidden), f"{layer}.self_attn.k_proj": (heads // 8, hidden),
              f"{layer}.self_attn.v_proj": (heads // 8, hidden), f"{layer}.self_attn.o_proj": (hidden, heads),
              f"{layer}.mlp.experts.0.gate_proj": (expert, hidden), f"{layer}.mlp.experts.0.up_proj": (expert, hidden),
              f"{layer}.mlp.experts.0.down_proj": (hidden, expert)}  # fmt: skip
    message = refusal(check_blocks, SimpleNamespace(**config), shapes, tuple(shapes), node)
    assert message is None if named is None else named in message


def test_only_whole_layers_at_the_ends_stay_in_bf16():
    """The keys Megatron has for ``fp8.recipe.exclude``, and a refusal of what it has none for."""
    names = [f"model.layers.{i}.mlp.{leaf}" for i in range(4) for leaf in ("up_proj", "down_proj")]

    def keys(*patterns):
        return bf16_layers(4, *LayerFilter(exclude=patterns).split({n: (128, 128) for n in [*names, "lm_head"]}))

    assert keys() == keys("lm_head") == {}
    assert list(keys("*.0.*", "*.1.*", "*.3.*").values()) == [True, 2, 1]
    for patterns, named in (
        (["*.1.*"], "layer 1 of 4"),
        (["*.2.*"], "layer 2 of 4"),
        (["*.0.mlp.down_proj"], "down_proj"),
    ):
        assert named in refusal(keys, *patterns)
