"""Recipe and the error types: all pure."""

import json
import pickle
import subprocess
import sys

import pytest

from verl_fp8.errors import ConfigError, ContractError, DataError, Fp8Error, SyncError
from verl_fp8.numerics.recipe import WHOLE, Recipe


@pytest.mark.parametrize("kind", [Fp8Error, ConfigError, DataError, ContractError, SyncError])
def test_errors_survive_pickling(kind):
    """Ray pickles exceptions between processes; the sentence and its three parts must come through."""
    error = pickle.loads(pickle.dumps(kind("an apple", "a pear", "swap them")))
    assert type(error) is kind
    assert (error.asked, error.found, error.fix) == ("an apple", "a pear", "swap them")
    assert str(error) == "asked: an apple; found: a pear; fix: swap them"


def test_errors_are_also_builtin_ones():
    """verl and Hydra catch ValueError and RuntimeError."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(ContractError, RuntimeError)
    assert issubclass(SyncError, RuntimeError)


def test_recipe_imports_no_torch():
    """The driver and the Hydra plug-in use recipes without paying for torch."""
    code = "import sys, verl_fp8.numerics.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_from_yaml_become_tuples():
    """Hydra hands lists over; equal recipes must be equal and hashable."""
    recipe = Recipe(weight_block=[64, 64], activation_block=[1, 64], gradient_block=[1, 64], eps=0)
    assert recipe.weight_block == (64, 64)
    assert hash(recipe) == hash(Recipe((64, 64), (1, 64), (1, 64)))


def test_blocks_from_omegaconf():
    """OmegaConf's ListConfig is a sequence but not a list."""
    omegaconf = pytest.importorskip("omegaconf")
    assert Recipe(weight_block=omegaconf.OmegaConf.create([128, 128])) == Recipe()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block", [128]),
        ("weight_block", [128, 0]),
        ("weight_block", [128, 128.0]),
        ("weight_block", [True, 128]),
        ("weight_block", "128,128"),
        ("weight_block", 128),
        ("weight_block", None),
        ("activation_block", [2, 128]),
        ("activation_block", [1, 64]),
        ("gradient_block", [128, 128]),
        ("gradient_block", [1, 64]),
        ("scale_format", "auto"),
        ("scale_format", None),
        ("backward", "bf16"),
        ("backward", ["fp8"]),
        ("fmt", "e5m2"),
        ("eps", -1e-9),
        ("eps", "0"),
        ("eps", True),
        ("eps", float("nan")),
        ("eps", float("inf")),
    ],
)
def test_a_bad_value_names_its_key(key, value):
    """Every wrong switch dies with the key that is wrong."""
    with pytest.raises(ConfigError, match=rf"fp8\.recipe\.{key}="):
        Recipe(**{key: value})


def test_from_dict_refuses_unknown_keys():
    """A typo must not train with the default."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.weight_blok="):
        Recipe.from_dict({"weight_blok": [128, 128]})


def test_recipe_round_trips_through_json():
    """The handshake sends recipes as JSON."""
    recipe = Recipe(scale_format="pow2", backward="dequantized", eps=1e-12)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert json.loads(recipe.canonical()) == recipe.to_dict()


def test_digest_is_frozen():
    """The digest is compared between processes and across versions: it may change only with the meaning."""
    assert Recipe().canonical() == (
        '{"activation_block":[1,128],"backward":"fp8","eps":0.0,"fmt":"e4m3","gradient_block":[1,128],'
        '"scale_format":"fp32","weight_block":[128,128]}'
    )
    assert Recipe().digest() == "8e61dbd989d8aa9b"


def test_digest_tells_every_field_apart():
    """Two recipes that differ in one field have different digests."""
    variants = [
        Recipe(),
        Recipe((64, 128)),
        Recipe((64, 64), (1, 64), (1, 64)),
        Recipe(scale_format="pow2"),
        Recipe(eps=1e-10),
        Recipe(backward="high_precision"),
        Recipe(backward="dequantized"),
    ]
    assert len({r.digest() for r in variants}) == len(variants)


@pytest.mark.parametrize(
    ("weight", "activation", "names", "shown"),
    [
        ((128, 128), (1, 128), ("block", "group"), "weights 128x128, activations 1x128"),
        ((1, WHOLE), (1, WHOLE), ("channel", "token"), "weights per channel, activations per token"),
        ((1, WHOLE), (WHOLE, WHOLE), ("channel", "tensor"), "weights per channel, activations per tensor"),
        ((WHOLE, WHOLE), (1, WHOLE), ("tensor", "token"), "weights per tensor, activations per token"),
        ((WHOLE, WHOLE), (WHOLE, WHOLE), ("tensor", "tensor"), "weights per tensor, activations per tensor"),
    ],
)
def test_granularity_has_a_name(weight, activation, names, shown):
    """What shares a scale is read off the blocks, for people and for the rollout, and survives JSON."""
    recipe = Recipe(weight, activation, (1, weight[1]))
    assert (recipe.weights, recipe.activations) == names and recipe.granularity == shown
    assert Recipe.from_dict(json.loads(recipe.canonical())) == recipe


@pytest.mark.parametrize(
    ("weight", "activation"),
    [
        ((WHOLE, 128), (1, 128)),
        ((128, WHOLE), (1, WHOLE)),
        ((128, 128), (1, WHOLE)),
        ((1, WHOLE), (1, 128)),
        ((WHOLE, WHOLE), (WHOLE, 1)),
    ],
)
def test_scales_over_different_stretches_are_refused(weight, activation):
    """A GEMM takes one scale of each operand for the same stretch of the contracted dimension."""
    with pytest.raises(ConfigError, match=r"fp8\.recipe\.(weight|activation)_block"):
        Recipe(weight, activation, (1, weight[1]))
