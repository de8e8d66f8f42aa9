"""Every recipe, composed by Hydra and validated by verl's own driver, on the configuration of the model it names."""

import json
import math
import runpy
from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.driver import RECIPES, compose, refusal, start
from verl_fp8.rules.run import validate_run
from verl_fp8.switches.hardware import Hardware, assume

SHARED = {
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_attention_heads": 32,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
}
# The values of config.json as the Qwen team publishes them with each model.
MODELS = {
    "Qwen/Qwen3-4B": SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "max_window_layers": 36,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "max_window_layers": 36,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": SHARED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "max_window_layers": 48,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
}
# Published sizes in billions of parameters; bytes each takes in training: fp32 weight, gradient, Adam's two moments.
BILLIONS = {"Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-30B-A3B": 30.5}
BYTES = 16
H100 = Hardware((9, 0), (13, 0), "2.20.2", "0.19.2")
NAMES = sorted(path.stem for path in RECIPES.glob("qwen3-*.yaml"))
DATA = ["data.train_files=train.parquet", "data.val_files=val.parquet"]


def mode_of(name: str) -> str:
    """The mode that the recipe's name says."""
    return name.split("-")[-2] + ("_megatron" if "megatron" in name else "")


def written(name: str) -> dict:
    """The recipe as it is in the file."""
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


@pytest.fixture(scope="session")
def folders(root, tmp_path_factory):
    """Model -> a folder with its config.json and a stand-in tokenizer."""
    prepare, made = runpy.run_path(str(root / "recipes" / "prepare.py")), {}
    for model, config in MODELS.items():
        made[model] = tmp_path_factory.mktemp(model.replace("/", "-"))
        prepare["tiny_tokenizer"](made[model])
        (made[model] / "config.json").write_text(json.dumps(config))
    return made


def composed(name: str, folders, *overrides: str):
    """The recipe on its model's configuration, as a user starts it."""
    path = folders[written(name)["actor_rollout_ref"]["model"]["path"]]
    return compose(f"actor_rollout_ref.model.path={path}", *DATA, *overrides, config_name=name, config_dir=RECIPES)


def test_there_is_a_recipe_for_each_model_and_mode():
    """Three models, FP8 rollout and unified FP8; two of them with Megatron."""
    models = [m.partition("/")[2].lower() for m in MODELS]
    fsdp = [f"{model}-{mode}-ais" for model in models for mode in ("rollout", "unified")]
    assert NAMES == sorted(fsdp + [f"{model}-megatron-unified-ais" for model in models[1:]])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_values_only(name):
    """The defaults in the documented order; no class, no argument of vLLM, no key of the groups' wiring in the body."""
    recipe = written(name)
    engine = [{"override model_engine": "megatron"}] if "megatron" in name else []
    assert recipe["defaults"] == ["ppo_trainer", {"fp8": mode_of(name)}, {"is_correction": "ais"}, *engine, "_self_"]
    keys = set()

    def walk(node):
        for key, value in node.items():
            keys.add(key)
            if isinstance(value, dict):
                walk(value)

    # The user's own keys of the group, which are values too, stand under fp8 at the top.
    walk({k: v for k, v in recipe.items() if k not in ("defaults", "fp8")})
    assert not keys & {
        "_target_",
        "fp8",
        "fp8_model",
        "engine_kwargs",
        "worker_extension_cls",
        "quantization",
        "strategy",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_how_it_is_started(name):
    """The header's command line names this very file."""
    header = (RECIPES / f"{name}.yaml").read_text().partition("defaults:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert (
        f"--config-dir recipes --config-name {name} " in header
        and f"verl-fp8 check --config-dir recipes --config-name {name}" in header
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_recipe_is_one_of_verls(name):
    """A key that verl's ppo_trainer does not have would be a typo nobody reads."""
    engine = ["model_engine=megatron"] if "megatron" in name else []
    stock = OmegaConf.to_container(compose(*engine, config_name="ppo_trainer"), resolve=False)

    def walk(node, known, path):
        for key, value in node.items():
            assert key in known, f"{path}{key}"
            if isinstance(value, dict):
                walk(value, known[key], f"{path}{key}.")

    # Keys under fp8 are judged by its own settings, see the next test.
    walk({k: v for k, v in written(name).items() if k not in ("defaults", "fp8")}, stock, "")


@pytest.mark.parametrize("name", NAMES)
def test_verls_driver_accepts_a_recipe(name, folders):
    """On H100s with TransformerEngine, everything between Hydra and Ray: verl's validation and ours."""
    with assume(H100):
        assert refusal(start, composed(name, folders)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_does_what_its_name_says(name, folders):
    """All linear layers but the output head are FP8, of an MoE all but the routers; as on an H100."""
    with assume(H100):
        summary = validate_run(composed(name, folders))
    mode = mode_of(name)
    config = MODELS[written(name)["actor_rollout_ref"]["model"]["path"]]
    assert (summary.fp8.mode, summary.correction.method) == (mode, "ais")
    assert (summary.backend, summary.kernel) == ("bf16" if mode == "rollout" else "te", "torch")
    kept, layers = set(summary.kept), config["num_hidden_layers"]
    # q, k, v, o of each layer, and gate, up, down of each MLP or expert.
    projections = 3 * config.get("num_experts", 1)
    routers = {f"model.layers.{i}.mlp.gate" for i in range(layers)} if "num_experts" in config else set()
    assert kept == {"lm_head", *routers} and len(summary.converted) == layers * (4 + projections)


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_answer_and_the_training_state_fit(name, folders):
    """A GPU's token budget holds one whole sequence; the fp32 training state fits into 80 GB beside vLLM's share."""
    config = composed(name, folders)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu) >= longest
    gpus = trainer.n_gpus_per_node * trainer.nnodes
    assert (
        config.data.train_batch_size * rollout.n
    ) % gpus == 0 and config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    state = BILLIONS[written(name)["actor_rollout_ref"]["model"]["path"]] * BYTES / gpus
    if not (actor.megatron if "megatron" in name else actor.fsdp_config).optimizer_offload:
        assert state + rollout.gpu_memory_utilization * 80 < 80
    assert math.isfinite(state)


@pytest.mark.parametrize("name", NAMES)
def test_a_contradiction_to_a_recipe_is_refused(name, folders):
    """An override that undoes the recipe's FP8 dies on the driver, as with the switches on the command line."""
    with assume(H100):
        message = refusal(start, composed(name, folders, "actor_rollout_ref.rollout.quantization=null"))
    assert "actor_rollout_ref.rollout.quantization" in message


def test_groups_can_be_changed_on_the_command_line(folders):
    """A recipe's groups are ordinary Hydra groups: another correction, or none."""
    with assume(H100):
        summary = validate_run(composed("qwen3-8b-unified-ais", folders, "is_correction=tis", "fp8=rollout"))
    assert (summary.fp8.mode, summary.correction.method) == ("rollout", "tis")
    with pytest.raises(HydraException):
        composed("qwen3-8b-unified-ais", folders, "is_correction=no_such_method")


def test_the_page_names_every_recipe_and_only_existing_files(root):
    """recipes/README.md lists each recipe, and each file it mentions is there."""
    import re

    page = (RECIPES / "README.md").read_text()
    assert all(name in page for name in NAMES)
    for name in re.findall(r"`((?:recipes|patches|verl_fp8)/[\w./-]+\.\w+)`", page):
        assert Path(root, name).exists(), name
