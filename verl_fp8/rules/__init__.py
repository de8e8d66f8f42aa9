"""Composing a run on the driver, before Ray starts.

``run`` is the entrance: ``asked`` reads the switches, the rules judge, ``fill`` writes the keys that the driver owns.
A rule is a function ``(run) -> Iterator[Refusal]`` that reads only; ``refuse`` has the parts it is made of. The rules:
``groups`` (do the switches act), ``job`` (trainer and rollout), ``correction``, ``megatron``, ``machine``, ``resume``,
``model`` with ``tensor_parallel``. Imports everything below ``hooks``.
"""
