"""Each hook into Hydra, verl and vLLM does what its symbol cannot say: it acts when asked for, and only then."""

import os
import subprocess
import sys
import zipfile

import pytest
from hydra.utils import get_method
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from tests.driver import SWITCHES, compose
from verl_fp8.layers.filter import LayerFilter, fused_group
from verl_fp8.layers.shapes import load_config, split_layers
from verl_fp8.rollout.arguments import EXTENSION, fp8_arguments

V = "actor_rollout_ref.rollout.engine_kwargs.vllm"
M = "actor_rollout_ref.model"


def python(code: str, *arguments: str, cwd=None, **environment) -> str:
    """Standard output of ``python -c code`` in a process of its own."""
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd,
                         env={**os.environ, **environment})  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- Hydra -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheel(root, tmp_path_factory):
    """Folder with the contents of a wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(folder),
        str(root),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_holds_every_group(root, wheel):
    """conf/ is data: a build that forgets it would leave the switches as strings."""
    source = root / "verl_fp8"
    groups = {str(path.relative_to(source)) for path in (source / "conf").rglob("*.yaml")}
    assert len(groups) >= 6
    assert groups == {str(path.relative_to(wheel / "verl_fp8")) for path in (wheel / "verl_fp8").rglob("*.yaml")}


WHERE = """
import sys
import verl, verl_fp8
from verl_fp8.tools.check import compose
print(verl_fp8.__file__, compose(sys.argv[1:]).fp8.mode)
"""


@pytest.mark.slow
def test_the_groups_are_found_from_a_wheel(wheel, tmp_path):
    """verl loads the entry point out of the wheel's metadata, and Hydra finds the group inside the wheel."""
    file, mode = python(WHERE, "+fp8=rollout", cwd=tmp_path, PYTHONPATH=str(wheel)).split()
    assert file.startswith(str(wheel)) and mode == "rollout"


@pytest.mark.slow
def test_the_groups_are_found_from_this_installation(root, tmp_path):
    """The same for the installation under test (editable in a checkout), from another directory."""
    file, mode = python(WHERE, "+fp8=rollout", cwd=tmp_path).split()
    assert file.startswith(str(root)) and mode == "rollout"


def job(**environment) -> str:
    """What verl's own entry point composes without a switch: ``main_ppo --cfg job``."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"]
    environment = {**os.environ, "VERL_PLATFORM": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment).stdout


@pytest.mark.slow
def test_without_a_switch_nothing_changes():
    """With the package installed and no switch, verl's configuration is letter for letter the one without it."""
    with_plugin = job()
    assert "actor_rollout_ref:" in with_plugin and "verl_fp8" not in with_plugin
    assert with_plugin == job(VERL_USE_EXTERNAL_PLUGINS="none")


def test_the_entry_point_is_light():
    """verl imports it in every process: no torch, no verl, no vLLM of its own."""
    code = "import sys, verl_fp8.hooks.verl_plugin; print(*{m.partition('.')[0] for m in sys.modules})"
    assert not {"torch", "verl", "vllm", "ray"} & set(python(code, VERL_PLATFORM="").split())


@pytest.mark.slow
def test_verls_own_plugin_loader_registers_it_once():
    """After ``import verl`` the search path plugin is known, and the driver's checks are in place, once."""
    code = """
import importlib, sys
import verl, wrapt
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
assert "verl_fp8.hooks.verl_plugin" in sys.modules and "verl.workers" not in sys.modules
names = [p.__name__ for p in Plugins.instance().discover(SearchPathPlugin)]
from verl.utils.config import validate_config
wrapped = [isinstance(f, wrapt.FunctionWrapper) for f in (validate_config, validate_config.__wrapped__)]
print(names.count("Fp8SearchPath"), *wrapped)
"""
    assert python(code, VERL_PLATFORM="").split() == ["1", "True", "False"]


# --- verl ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_is_absent_before_register_and_present_after():
    """Our backend has a name of its own, so stock fsdp2 stays what it was; registering twice is once."""
    code = """
import sys
from verl.workers.engine.base import EngineRegistry
import verl.workers.engine
from verl_fp8.hooks import register
before = {name: dict(engines) for name, engines in EngineRegistry._engines["language_model"].items()}
assert "fsdp2_fp8" not in before and "verl_fp8.trainer.engine_fsdp" not in sys.modules
register.register_fsdp_engine()
register.register_fsdp_engine()
after = {name: dict(engines) for name, engines in EngineRegistry._engines["language_model"].items()}
ours = after.pop("fsdp2_fp8")
assert after == before
engine = EngineRegistry.get_engine_cls("language_model", "fsdp2_fp8")
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
print(engine.__name__, issubclass(engine, FSDPEngineWithLMHead), engine is ours["cpu"], before["fsdp2"]["cpu"].__name__)
"""
    assert python(code).split() == ["Fp8FSDPEngineWithLMHead", "True", "True", "CPUFSDPEngine"]


@pytest.mark.slow
def test_the_stage_is_absent_before_register_and_present_after_once():
    """verl's trainer is untouched until a run with a switch builds its model configuration; attaching twice is once."""
    code = """
import wrapt
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl_fp8.hooks import register
methods = lambda: [PPOTrainer.__dict__[n] for n in ("_compute_advantage", "_update_actor")]
wrapped = lambda: [isinstance(method, wrapt.FunctionWrapper) for method in methods()]
originals = methods()
assert wrapped() == [False, False]
register.attach_stage()
register.attach_stage()
assert [method.__wrapped__ for method in methods()] == originals
from verl.trainer.ppo.v1 import get_trainer_cls
for mode in ("sync", "colocate_async", "separate_async"):
    own = vars(get_trainer_cls(mode))
    assert "_compute_advantage" not in own and "_update_actor" not in own
print(wrapped())
"""
    assert python(code).strip() == "[True, True]"


@pytest.mark.slow
def test_the_server_adapter_is_verls_before_register_and_ours_after():
    """The entry of verl's rollout table, and that verl's own lookup then finds a subclass of its adapter."""
    code = """
from verl.workers.rollout import base
from verl_fp8.hooks import register
before = base.get_rollout_class("vllm", "async")
register.register_server_adapter()
after = base.get_rollout_class("vllm", "async")
print(before.__module__.partition(".")[0], after.__module__, issubclass(after, before))
"""
    assert python(code).split()[-3:] == ["verl", "verl_fp8.sync.sender", "True"]


def test_the_users_own_external_lib_is_imported_beside_ours(tiny_model, tmp_path, monkeypatch):
    """The switches do not use up ``model.external_lib``: the model configuration still imports the user's."""
    (tmp_path / "users_own_lib.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = compose(*SWITCHES, f"{M}.path={tiny_model}", f"{M}.external_lib=users_own_lib")
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    assert type(model).__name__ == "ModelConfig" and model.local_path == tiny_model
    assert sys.modules["users_own_lib"].LOADED


def test_the_actor_and_reference_pick_our_engine_and_keep_their_values(tiny_model):
    """verl looks the engine up by the strategy it finds on the engine's configuration, in every role."""
    config = compose(*SWITCHES, f"{M}.path={tiny_model}", "actor_rollout_ref.actor.grad_clip=0.3", "fp8.recipe.eps=0.5")
    # What the worker makes of the reference's node (verl/workers/engine_workers.py, ActorRolloutRefWorker.init_model).
    ref = OmegaConf.create(config, flags={"struct": False}).actor_rollout_ref.ref
    ref.ppo_micro_batch_size_per_gpu = ref.log_prob_micro_batch_size_per_gpu
    for key in [key for key in ref if key.startswith("log_prob_")]:
        ref.pop(key)
    for role, node in (("actor", config.actor_rollout_ref.actor), ("ref", ref)):
        built = omega_conf_to_dataclass(node)
        assert (built.strategy, built.engine.strategy) == ("fsdp2", "fsdp2_fp8")
        assert built.engine.settings().recipe.eps == 0.5
        assert built.engine.forward_only is (role == "ref")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).grad_clip == 0.3


def test_a_correction_alone_leaves_the_engine_to_verl(tiny_model):
    """``is_correction`` without ``fp8``: verl's own engine, rollout and strategy."""
    config = compose("+is_correction=ais", f"{M}.path={tiny_model}", "actor_rollout_ref.actor.strategy=fsdp")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.strategy, type(actor.engine).__module__.partition(".")[0]) == ("fsdp", "verl")
    assert config.actor_rollout_ref.rollout._target_ == "verl.workers.config.RolloutConfig"


@pytest.mark.parametrize("group", ["fp8/unified", "fp8/rollout", "is_correction/ais", "is_correction/tis"])
def test_every_target_of_a_group_exists(root, group):
    """A ``_target_`` is a string: Hydra would find out in a worker."""
    config = compose(f"+{group.replace('/', '=')}")
    targets = [line.split()[1] for line in OmegaConf.to_yaml(config).splitlines() if "_target_: verl_fp8" in line]
    assert targets
    for target in set(targets):
        assert callable(get_method(target))


# --- vLLM ------------------------------------------------------------------------------------------------------------


def vllm_arguments(config) -> dict:
    """vLLM's arguments as verl's server would read them out of the configuration."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs["vllm"]


def test_the_users_vllm_arguments_survive_beside_ours(tiny_model):
    """Through verl's command-line builder and vLLM's own parser: the user's values are there, and so are ours."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = [
        f"+{V}.hf_overrides.rope_theta=7",
        f"+{V}.additional_config.mine=1",
        f"+{V}.max_logprobs=5",
        f"+{V}.async_scheduling=false",
    ]
    arguments = vllm_arguments(compose(*SWITCHES, f"{M}.path={tiny_model}", *own, "fp8.recipe.weight_block=[64,64]"))
    arguments = {k: v for k, v in arguments.items() if v is not None}
    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(build_cli_args_from_config(arguments))
    assert (parsed.max_logprobs, parsed.async_scheduling, parsed.hf_overrides["rope_theta"]) == (5, False, 7)
    assert parsed.additional_config["mine"] == 1 and parsed.additional_config["verl_fp8"]["recipe"]["weight_block"] == [
        64,
        64,
    ]
    assert parsed.worker_extension_cls == EXTENSION
    assert parsed.hf_overrides["quantization_config"]["weight_block_size"] == [64, 64]


def test_vllm_reads_the_quantisation_config_as_meant(tiny_model):
    """vLLM's own Fp8Config: serialised codes, dynamic activations, our blocks, our exact list."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    overrides = vllm_arguments(compose(*SWITCHES, f"{M}.path={tiny_model}", "fp8.recipe.exclude=['*.0.mlp.*']"))[
        "hf_overrides"
    ]
    read = Fp8Config.from_config(overrides["quantization_config"])
    assert (read.is_checkpoint_fp8_serialized, read.activation_scheme, read.weight_block_size) == (
        True,
        "dynamic",
        [128, 128],
    )
    mlp = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("down", "gate", "up")]
    assert sorted(read.ignored_layers) == ["lm_head", *mlp]


ARCHITECTURES = {
    "qwen3": ("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM"),
    "qwen2": ("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM"),
    "llama": ("vllm.model_executor.models.llama", "LlamaForCausalLM"),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "exclude", [[], ["*.layers.1.*"], ["*.self_attn.*", "*.0.mlp.down_proj"]], ids=["nothing", "a layer", "parts"]
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_vllm_skips_exactly_the_layers_that_the_trainer_keeps(make_model, arch, exclude, tied):
    """By vLLM's own matcher and table of fused layers: every converted layer is quantised, every kept one is not."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    node = {"path": make_model(arch, tied), "hf_config_path": None, "trust_remote_code": False, "override_config": {}}
    converted, kept, _ = split_layers(load_config(node), LayerFilter(exclude=exclude))
    arguments = fp8_arguments({"mode": "unified", "recipe": {"exclude": exclude}}, node, {})
    ignored = arguments["hf_overrides"]["quantization_config"]["ignored_layers"]
    module, name = ARCHITECTURES[arch]
    fused = getattr(__import__(module, fromlist=[name]), name).packed_modules_mapping
    assert set(fused) == {"qkv_proj", "gate_up_proj"}
    assert converted and kept
    for layer in converted:
        assert is_layer_skipped(fused_group(layer) or layer, ignored, fused) is False, layer
    for layer in kept:
        assert is_layer_skipped(fused_group(layer) or layer, ignored, fused) is True, layer


@pytest.mark.slow
def test_the_cpu_kernel_is_first_in_vllms_table_after_install_and_once():
    """vLLM's CPU table of block kernels: ours is asked first, declines what is not ours, and is there once."""
    code = """
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum
before = list(linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU])
from verl_fp8.rollout import linear_cpu
linear_cpu.install_linear_cpu()
linear_cpu.install_linear_cpu()
after = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
assert after[1:] == before
from vllm.config import VllmConfig, set_current_vllm_config
with set_current_vllm_config(VllmConfig()):
    print(after[0].__name__, after[0].is_supported()[0], after[0].can_implement(None)[0])
"""
    assert python(code).strip().splitlines()[-1].split() == ["ReferenceFp8BlockKernel", "True", "False"]


@pytest.mark.slow
def test_the_vllm_plugin_touches_nothing_on_gpu():
    """Without the CPU platform the entry point of vLLM's plugins imports nothing of ours."""
    code = "import sys; from verl_fp8.hooks.vllm_plugin import register; register(); print(*sys.modules)"
    assert "verl_fp8.rollout.linear_cpu" not in python(code, VERL_PLATFORM="").split()
