"""verl_fp8: FP8 reinforcement-learning training as a plugin for verl.

The trainer and the vLLM rollout quantise with one formula (:mod:`verl_fp8.numerics`), over one list of layers
(:class:`verl_fp8.layers.filter.LayerFilter`). This module imports nothing heavy: it is loaded in every verl process.
"""

__version__ = "0.1.0"
