"""The version to install where a message says so, in one place.

Imports nothing, since ``verl-fp8 doctor`` needs it where other packages are broken. pyproject.toml's extra ``te`` pins
the same; which versions are taken says :mod:`verl_fp8.switches.hardware`.
"""

TRANSFORMER_ENGINE = "2.20.2"
INSTALL_TRANSFORMER_ENGINE = f"pip install --no-build-isolation 'transformer-engine[pytorch]=={TRANSFORMER_ENGINE}'"
