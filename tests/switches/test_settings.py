"""The two groups as values: what every process reads out of the same configuration nodes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import verl_fp8
from verl_fp8.errors import ConfigError
from verl_fp8.layers.filter import LayerFilter
from verl_fp8.numerics.recipe import WHOLE, Recipe
from verl_fp8.switches.settings import CHOICES, METHOD_KEYS, METHODS, MODES, CorrectionSettings, Fp8Settings

CONF = Path(verl_fp8.__file__).parent / "conf"


def group(name: str, choice: str):
    """The node a group file sets under its own name, its wiring included."""
    wiring, chosen = (OmegaConf.load(CONF / name / f"{file}.yaml").get(name) for file in ("wiring", choice))
    return OmegaConf.merge(wiring or {}, chosen or {})


def fp8(node=None, **changes) -> Fp8Settings:
    """Parsed as on a machine without a GPU."""
    return Fp8Settings.parse(
        OmegaConf.merge(group("fp8", "unified") if node is None else node, changes), capability=None
    )


def correction(method: str = "ais", **changes) -> CorrectionSettings:
    """Parsed from the group's own file."""
    return CorrectionSettings.parse(OmegaConf.merge(group("is_correction", method), changes))


@pytest.mark.parametrize("mode", MODES)
def test_the_group_files_say_what_the_defaults_say(mode):
    """conf/fp8/*.yaml spell the defaults of the dataclasses out: a key added to one of them only would show here."""
    assert fp8(group("fp8", mode)) == Fp8Settings(mode=mode)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_file_that_sets_its_keys(method):
    """conf/is_correction/<method>.yaml sets exactly the keys that the method has."""
    parsed = correction(method)
    assert parsed.method == method and set(parsed.parameters) == set(METHOD_KEYS[method])


def test_the_groups_on_disk_are_the_choices_there_are():
    """A file is a choice and a choice is a file, besides the wiring they share."""
    assert {path.stem for path in (CONF / "fp8").glob("*.yaml")} == {*CHOICES, "wiring", "wiring_fsdp2"}
    assert {path.stem for path in (CONF / "is_correction").glob("*.yaml")} == {*METHODS, "wiring"}


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create], ids=["dict", "OmegaConf"])
def test_plain_and_omegaconf_nodes_are_read_alike(wrap):
    """The driver sees OmegaConf, a vLLM worker the plain dict that came through vLLM's arguments."""
    node = wrap({"mode": "rollout", "recipe": {"weight_block": [64, 32], "exclude": ["a.*"], "eps": 1}})
    parsed = Fp8Settings.parse(node, capability=None)
    block = {"weight_block": (64, 32), "activation_block": (1, 32), "gradient_block": (1, 32)}
    assert parsed.recipe == Recipe(**block, eps=1.0) and parsed.layers == LayerFilter(exclude=("a.*",))
    assert (parsed.mode, parsed.sync_timeout, type(parsed.sync_timeout)) == ("rollout", 60.0, float)


@pytest.mark.parametrize(
    ("requested", "capability", "format"),
    [
        ("auto", None, "fp32"),
        ("auto", (9, 0), "fp32"),
        ("auto", (10, 0), "pow2"),
        ("auto", (12, 0), "pow2"),
        ("fp32", (9, 0), "fp32"),
        ("pow2", None, "pow2"),
        ("pow2", (9, 0), "pow2"),
    ],
)
def test_the_scale_format_follows_the_machine_unless_asked_for(requested, capability, format):
    """auto: float scales on Hopper and without a GPU, powers of two on Blackwell; the request stays readable."""
    parsed = Fp8Settings.parse({"recipe": {"scale_format": requested}}, capability=capability)
    assert (parsed.scale_format, parsed.recipe.scale_format) == (requested, format)


def test_float_scales_on_blackwell_are_refused():
    """Its tensor cores take UE8M0 scales only."""
    with pytest.raises(ConfigError, match=r"fp8.recipe.scale_format=fp32.*10\.0"):
        Fp8Settings.parse({"recipe": {"scale_format": "fp32"}}, capability=(10, 0))


@pytest.mark.parametrize("capability", [None, (9, 0), (10, 0)])
def test_the_digest_is_of_what_is_computed_not_of_what_was_asked(capability):
    """``auto`` and its outcome have one digest, so that trainer and rollout can compare."""
    asked = Fp8Settings.parse({}, capability=capability)
    meant = Fp8Settings.parse({"recipe": {"scale_format": asked.recipe.scale_format}}, capability=capability)
    assert asked.recipe.digest() == meant.recipe.digest()


# Values of any type that no key takes, and for each key one of the right type that it does not take.
WRONG = [None, "", "no such value", [], {}]
FP8_KEYS = {"mode": 1, "backend": True, "weight_sync": 8, "sync_timeout": -0.5, "exact": 1, "lm_head": 32}
RECIPE_KEYS = {
    "weights": 1,
    "activations": True,
    "weight_block": [128, -128],
    "scale_format": 2,
    "backward": 8,
    "eps": True,
}
AIS_KEYS = {"scope": 1, "mode": 0, "delta_factor": 0, "delta_steps": 1.5, "allow_truncated_support": 0}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, own in FP8_KEYS.items() for v in [*WRONG, own]])
def test_a_wrong_value_of_fp8_names_its_key(key, value):
    """No wrong type or value is cast, defaulted or passed on."""
    with pytest.raises(ConfigError) as raised:
        Fp8Settings.parse({key: value}, capability=None)
    assert f"fp8.{key}=" in raised.value.asked


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, own in RECIPE_KEYS.items() for v in [*WRONG, own]])
def test_a_wrong_value_of_the_recipe_names_its_key(key, value):
    """The same below fp8.recipe."""
    with pytest.raises(ConfigError) as raised:
        Fp8Settings.parse({"recipe": {key: value}}, capability=None)
    assert f"fp8.recipe.{key}=" in raised.value.asked


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, own in AIS_KEYS.items() for v in [*WRONG, own]])
def test_a_wrong_value_of_is_correction_names_its_key(key, value):
    """The keys that are not the method's own numbers (those are judged by AISConfig and by verl)."""
    with pytest.raises(ConfigError) as raised:
        CorrectionSettings.parse({key: value})
    assert f"is_correction.{key}=" in raised.value.asked


@pytest.mark.parametrize("exclude", [None, "lm_head", [1], [""], {}, 3])
def test_a_wrong_exclude_names_its_key(exclude):
    """A string would be read as a list of letters, an empty pattern would match nothing."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.exclude"):
        Fp8Settings.parse({"recipe": {"exclude": exclude}}, capability=None)


@pytest.mark.parametrize("key", ["weight_block", "modes", "Mode", "scale_format", "recipes"])
def test_an_unknown_key_of_fp8_is_refused(key):
    """A typo, or a key one level too high: named, with the keys there are."""
    with pytest.raises(ConfigError, match=rf"fp8.{key}=.*no such key.*weight_sync"):
        Fp8Settings.parse({key: 1}, capability=None)


@pytest.mark.parametrize("key", ["activation_block", "gradient_block", "block", "digest"])
def test_an_unknown_key_of_the_recipe_is_refused(key):
    """The other two blocks follow from the weight's columns and are no keys."""
    with pytest.raises(ConfigError, match=rf"fp8.recipe.{key}=.*no such key.*weight_block"):
        Fp8Settings.parse({"recipe": {key: [1, 128]}}, capability=None)


@pytest.mark.parametrize("method", METHODS)
def test_a_key_of_another_method_is_refused(method):
    """A key that the chosen method does not read would be a setting without effect."""
    foreign = {key for keys in METHOD_KEYS.values() for key in keys} - set(METHOD_KEYS[method])
    for key in foreign:
        with pytest.raises(ConfigError, match=rf"is_correction.{key}=.*no such key"):
            correction(method, **{key: 1.0})


@pytest.mark.parametrize("node", [None, 1, True, ["unified"]])
@pytest.mark.parametrize(
    "parse", [lambda n: Fp8Settings.parse(n, capability=None), CorrectionSettings.parse], ids=["fp8", "is_correction"]
)
def test_a_node_that_is_no_mapping_is_refused(parse, node):
    """Hydra takes ``+fp8=[unified]`` too."""
    with pytest.raises(ConfigError, match=r"select the group"):
        parse(node)


@pytest.mark.parametrize(
    ("parse", "key"),
    [(lambda n: Fp8Settings.parse(n, capability=None), "fp8"), (CorrectionSettings.parse, "is_correction")],
)
def test_a_string_says_that_the_group_was_not_found(parse, key):
    """What Hydra leaves behind when the package was not there: the fail-open case."""
    with pytest.raises(ConfigError, match=rf"\+{key}=unified.*not on Hydra's search path"):
        parse("unified")


def test_a_dump_has_a_folder_and_limits():
    """is_correction.dump and its two limits; without a folder nothing is dumped."""
    assert correction().dump is None
    dump = correction(dump="/tmp/d", dump_steps=3, dump_max_bytes=10).dump
    assert (dump.folder, dump.steps, dump.max_bytes) == ("/tmp/d", 3, 10)
    for key, value in {"dump": 1, "dump_steps": 0, "dump_max_bytes": True}.items():
        with pytest.raises(ConfigError, match=rf"is_correction.{key}="):
            correction(**{"dump": "/tmp/d", key: value})


def test_parsing_leaves_the_node_alone():
    """The same node is parsed in several places of a process."""
    node = group("fp8", "unified")
    before = OmegaConf.to_yaml(node)
    assert Fp8Settings.parse(node, capability=None) == Fp8Settings.parse(node, capability=None)
    assert OmegaConf.to_yaml(node) == before


def test_rollout_per_tensor_is_rollout_with_two_keys():
    """The setting of the AIS paper: one dynamic E4M3 scale a tensor on both operands, bf16 training."""
    parsed = fp8(OmegaConf.merge(group("fp8", "rollout"), group("fp8", "rollout_per_tensor")))
    per_tensor = Recipe((WHOLE, WHOLE), (WHOLE, WHOLE), (1, WHOLE))
    assert parsed == Fp8Settings(mode="rollout", recipe=per_tensor)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"mode": "unified"}, ("fp8.recipe.weights=tensor", "fp8.mode=unified")),
        ({"backend": "te"}, ("fp8.recipe.weights=tensor", "fp8.backend=te")),
        ({"backend": "torch"}, ("fp8.recipe.weights=tensor", "fp8.backend=torch")),
        ({"rollout_kernel": "cutlass"}, ("fp8.recipe.weights=tensor", "fp8.rollout_kernel=cutlass")),
        ({"recipe": {"weights": "tensor"}}, ("fp8.recipe.weights=tensor", "fp8.recipe.activations=group")),
        ({"recipe": {"activations": "token"}}, ("fp8.recipe.weights=block", "fp8.recipe.activations=token")),
        (
            {"recipe": {"weights": "channel", "activations": "token", "weight_block": [64, 64]}},
            ("fp8.recipe.weight_block",),
        ),
        ({"recipe": {"weight_block": [-1, -1]}}, ("fp8.recipe.weight_block=[-1, -1]",)),
    ],
)
def test_a_granularity_that_nothing_computes_names_its_keys(changes, keys):
    """The trainer's backends and vLLM's GPU kernels know blocks; two operands' scales must fit together."""
    per_tensor = {"weights": "tensor", "activations": "tensor"}
    with pytest.raises(ConfigError) as raised:
        Fp8Settings.parse({"mode": "rollout", "recipe": per_tensor, **changes}, capability=None)
    assert all(key in str(raised.value) for key in keys)
