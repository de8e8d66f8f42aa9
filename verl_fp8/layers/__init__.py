"""Which layers are FP8: ``filter`` decides from names and shapes, ``shapes`` finds both in a model's configuration.

Imports ``errors`` and ``numerics``.
"""
