"""The arithmetic of FP8, one for trainer, rollout and weight sync.

``recipe`` says how, ``quantize`` is the formula (``quantize_triton`` the same bits on a GPU), ``linear``,
``scaled_mm`` and ``experts`` multiply codes, ``exact`` fixes every other rounding. Imports ``errors`` only; knows
no verl and no vLLM.
"""
