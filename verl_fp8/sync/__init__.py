"""The weight sync: ``gather`` collects shards as codes, ``stream`` quantises and checks, ``sender`` carries to
vLLM.

``checksum`` proves that what was loaded is what was sent, ``segments`` looks after the shared memory. Imports
nothing from ``correction``, ``trainer`` or ``rollout``, which stand above or beside it.
"""
