"""The house: which folder may know which, read off the sources, lazy imports and names in strings included."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl_fp8

PACKAGE = Path(verl_fp8.__file__).parent
FILES = {
    ".".join(("verl_fp8", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
UPSTREAM = {"verl", "vllm", "transformer_engine", "transfer_queue"}

# A folder knows those on the floors below its own; trainer and rollout never meet, nor do sync and correction.
FLOORS = (
    {"errors"},
    {"upstream", "numerics"},
    {"layers"},
    {"cpu"},
    {"switches"},
    {"sync", "correction"},
    {"trainer", "rollout"},
    {"rules"},
    {"hooks"},
    {"tools"},
    {"__main__"},
)
FLOOR = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}
LONGEST_FILE, LONGEST_LINE, LONGEST_FUNCTION, MOST_FLAT = 420, 120, 75, 6


def folder(name: str) -> str:
    """``verl_fp8.sync.stream`` -> ``sync``."""
    return name.split(".")[1]


def imports(name: str, *, lazy: bool = True) -> set[str]:
    """Dotted names a file imports, modules of ours as such; without ``lazy`` only those executed on import."""
    found, pending = set(), list(TREES[name].body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (members & set(FILES)) or {node.module}
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return found


def strings(name: str) -> set[str]:
    """Modules of ours that a file names in a string which is no docstring: import paths, ``-m`` arguments."""
    tree = TREES[name]
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, scopes) and isinstance(n.body[0], ast.Expr)}
    texts = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
    ]
    return {module for text in texts for module in named(text)}


def named(text: str) -> set[str]:
    """Modules of ours that a text names by their dotted path."""
    found = set()
    for path in re.findall(r"verl_fp8(?:\.\w+)+", text):
        while path not in FILES and "." in path:
            path = path.rpartition(".")[0]
        found |= {path} & set(FILES)
    return found


def ours(name: str, **kwargs) -> set[str]:
    """Our files that a file imports; with lazy imports also those it names in strings."""
    more = strings(name) if kwargs.get("lazy", True) else set()
    return ((imports(name, **kwargs) & set(FILES)) | more) - {name, "verl_fp8.__init__"}


def reached(name: str, **kwargs) -> set[str]:
    """Our files that come with a file, directly or through others."""
    seen, pending = set(), [name]
    while pending:
        new = ours(pending.pop(), **kwargs) - seen
        seen |= new
        pending += new
    return seen


@pytest.mark.parametrize("name", FILES)
def test_an_arrow_points_down(name):
    """Every import, lazy ones and strings too, stays in its folder or goes to a lower floor."""
    if name == "verl_fp8.__init__" or name.startswith("verl_fp8.conf"):
        assert not ours(name)
        return
    own = folder(name)
    for other in ours(name):
        assert folder(other) == own or FLOOR[folder(other)] < FLOOR[own], f"{name} -> {other}"


@pytest.mark.parametrize("name", FILES)
def test_nothing_goes_in_a_circle(name):
    """Nobody reaches itself, whatever it imports lazily or names in a string."""
    assert name not in reached(name)


@pytest.mark.parametrize("path", sorted((PACKAGE / "conf").rglob("*.yaml")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_configuration_names_what_exists(path):
    """Each dotted path of ours in the Hydra groups is a class or function of hooks, or the rollout's worker."""
    for dotted in re.findall(r"verl_fp8(?:\.\w+)+", re.sub(r"#.*", "", path.read_text())):
        module, _, leaf = dotted.rpartition(".")
        assert module in {"verl_fp8.hooks.targets", "verl_fp8.rollout.worker"}
        assert leaf in {n.name for n in TREES[module].body if isinstance(n, ast.ClassDef | ast.FunctionDef)}


def test_a_folder_tells_what_lives_there():
    """Each ``__init__.py`` is a docstring of up to ten lines, and imports nothing."""
    for path in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(path.read_text())
        doc = ast.get_docstring(tree)
        assert doc and len(doc.splitlines()) <= 10, path
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)], path


def test_few_files_stand_outside_a_room():
    """What a reader sees first is folders."""
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FLAT
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == {
        *FLOOR, "conf"
    } - {"errors", "__main__"}  # fmt: skip


def test_the_tests_have_the_same_rooms():
    """tests/<folder> for verl_fp8/<folder>, where every test of one of its files is looked for."""
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        parts = path.relative_to(tests).parts[:-1]
        assert not parts or parts[0] in {"recipes", "patches", "runs"} or (PACKAGE.joinpath(*parts)).is_dir(), path


PURE = ("errors", "numerics.recipe", "numerics.blocks", "numerics.quantize", "numerics.linear", "layers.filter")
PURE += ("correction.ais", "switches.settings", "sync.stream", "sync.gather")


@pytest.mark.parametrize("name", PURE)
def test_the_arithmetic_knows_no_framework(name):
    """These run anywhere, without verl, vLLM or TransformerEngine."""
    assert not {found.partition(".")[0] for found in imports(f"verl_fp8.{name}")} & UPSTREAM


@pytest.mark.parametrize("name", sorted(set(FILES) - {"verl_fp8.trainer.te"}))
def test_only_te_imports_transformer_engine(name):
    """One file to read when TransformerEngine changes."""
    assert not any(found.partition(".")[0] == "transformer_engine" for found in imports(name))


@pytest.mark.parametrize("name", ["trainer.te", "trainer.scaled_mm", "numerics.scaled_mm"])
def test_the_kernels_know_neither_verl_nor_vllm(name):
    """A backend is a linear layer; who trains with it is not its business."""
    assert not {found.partition(".")[0] for found in imports(f"verl_fp8.{name}")} & {"verl", "vllm", "transfer_queue"}


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.startswith("verl_fp8.rollout.")))
def test_the_rollout_never_loads_the_trainer(name):
    """vLLM's processes load neither the engine nor TransformerEngine, not even through another file."""
    assert not {folder(other) for other in reached(name)} & {"trainer", "correction", "rules", "hooks"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_in_a_sitting(name):
    """Its lines, their length, and each function's."""
    lines = FILES[name].read_text().splitlines()
    assert len(lines) <= LONGEST_FILE
    assert not [number for number, line in enumerate(lines, 1) if len(line) > LONGEST_LINE]
    functions = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno >= LONGEST_FUNCTION]


@pytest.mark.parametrize("name", FILES)
def test_users_get_errors_not_assertions(name):
    """``python -O`` drops assertions, and an AssertionError names no key."""
    assert not [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]


LIGHT = ("errors", "numerics.recipe", "layers.filter", "switches.settings", "upstream.contract", "hooks.verl_plugin")


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_files_load_neither_torch_nor_hydra(name):
    """Measured in a process of its own: the switches' values, the table and the entry point cost no such import."""
    code = f"import sys, verl_fp8.{name}; print(*{{'torch', 'hydra'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert run.stdout.strip() == ""
