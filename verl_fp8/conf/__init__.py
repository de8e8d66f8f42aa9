"""Hydra groups ``fp8`` and ``is_correction``: the whole wiring of the switches, nothing else."""
