"""Which module may know which: read off the sources, so that a shortcut shows up as a failing test."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl_fp8

PACKAGE = Path(verl_fp8.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}
UPSTREAM = {"verl", "vllm", "transformer_engine", "transfer_queue"}

# The lines a module may have before it is split.
LONGEST = 420


def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Dotted names a module imports, ``verl_fp8.x`` for ours; without ``lazy`` only those executed on import."""
    found, pending = set(), list(MODULES[module].body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "verl_fp8" else {node.module}
            )
            found |= names
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return found


def ours(module: str, **kwargs) -> set[str]:
    """Our modules that a module imports."""
    return {name.split(".")[1] for name in imports(module, **kwargs) if name.startswith("verl_fp8.")} & set(MODULES)


def reached(module: str, **kwargs) -> set[str]:
    """Our modules that come with a module, directly or through others."""
    seen, pending = set(), [module]
    while pending:
        new = ours(pending.pop(), **kwargs) - seen
        seen |= new
        pending += new
    return seen


@pytest.mark.parametrize(
    ("module", "may_import"),
    [
        ("__init__", set()),
        ("errors", set()),
        ("recipe", {"errors"}),
        ("blocks", set()),
        ("numerics", {"blocks", "errors", "recipe"}),
        ("linear", {"errors", "recipe", "numerics", "experts"}),
        ("ais", {"errors"}),
        ("settings", {"errors", "hardware", "recipe"}),
        ("checksum", set()),
        ("sync", {"checksum", "errors", "recipe", "numerics", "settings", "triton_quant"}),
        ("gather", {"errors", "experts", "numerics", "recipe", "settings"}),
        ("contract", {"errors", "symbols"}),
        ("symbols", set()),
        ("plugin", {"cpu", "validate", "vendored"}),
        ("vllm_plugin", {"vllm_cpu", "vllm_gpu"}),
    ],
)
def test_a_module_knows_only_those_below_it(module, may_import):
    """The arrows of the architecture: errors <- recipe <- numerics <- linear, ais <- stage, and so on."""
    assert ours(module) <= may_import


@pytest.mark.parametrize("module", ["errors", "recipe", "blocks", "numerics", "linear", "ais", "settings", "sync", "gather"])
def test_the_arithmetic_knows_no_framework(module):
    """These run anywhere, without verl, vLLM or TransformerEngine."""
    assert not {name.partition(".")[0] for name in imports(module)} & UPSTREAM


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"te"}))
def test_only_te_imports_transformer_engine(module):
    """One file to read when TransformerEngine changes."""
    assert not any(name.partition(".")[0] == "transformer_engine" for name in imports(module))


@pytest.mark.parametrize("module", sorted({"te", "scaled_mm"} & set(MODULES)))
def test_the_kernels_know_neither_verl_nor_vllm(module):
    """A backend is a linear layer; who trains with it is not its business."""
    assert not {name.partition(".")[0] for name in imports(module)} & {"verl", "vllm", "transfer_queue"}


@pytest.mark.parametrize("module", sorted({"rollout", "vllm_cpu", "vllm_gpu", "exact_vllm"} & set(MODULES)))
def test_the_rollout_never_loads_the_trainer(module):
    """vLLM's processes load neither the engine nor TransformerEngine, not even through another module."""
    assert not reached(module) & {"te", "engine", "stage", "plugin"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_imports_an_entry_point(module):
    """The entry points are loaded by verl, vLLM and the shell."""
    assert not ours(module) & {"plugin", "vllm_plugin", "__main__"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_goes_in_a_circle(module):
    """What is executed on import is a tree; what must point back is imported where it is used."""
    assert module not in reached(module, lazy=False)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_fits_in_a_sitting(module):
    """Past the limit a module is split."""
    assert len((PACKAGE / f"{module}.py").read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("module", sorted(MODULES))
def test_users_get_errors_not_assertions(module):
    """``python -O`` drops assertions, and an AssertionError names no key."""
    assert not [node.lineno for node in ast.walk(MODULES[module]) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("module", ["errors", "recipe", "settings", "contract", "plugin"])
def test_the_light_modules_load_neither_torch_nor_hydra(module):
    """Measured in a process of its own: the switches' values, the table and the entry point cost no such import."""
    code = f"import sys, verl_fp8.{module}; print(*{{'torch', 'hydra'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert run.stdout.strip() == ""
