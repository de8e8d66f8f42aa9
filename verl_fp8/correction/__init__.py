"""Importance sampling between trainer and rollout: ``ais`` is the method, ``verls_methods`` are verl's own.

``statistics`` sums a batch for ``ais``, ``reweight`` applies a correction to a batch, ``stage`` hangs it into verl's
trainer, ``dump`` writes what ``verl-fp8 replay`` reads. A new correction goes here. Imports nothing from ``sync``,
``trainer`` or ``rollout``.
"""
