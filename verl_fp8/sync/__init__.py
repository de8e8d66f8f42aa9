"""The weight sync's sending half: ``gather`` collects shards as codes, ``stream`` makes and checks the contents,
``sender`` carries them to vLLM, where ``rollout.worker`` receives.

``checksum`` proves that what was loaded is what was sent, ``segments`` looks after the shared memory. Imports nothing
from ``correction``, ``trainer`` or ``rollout``, which stand above or beside it.
"""
