"""What was asked: the nodes ``fp8`` and ``is_correction`` parsed (``settings``), and what ``auto`` is on a machine
(``hardware``).

Imports ``errors``, ``upstream``, ``numerics`` and ``layers``.
"""
