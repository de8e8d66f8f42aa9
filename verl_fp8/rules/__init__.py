"""Judging a composed configuration on the driver, before Ray starts: ``run`` asks every rule.

A rule reads, refuses with what was asked, what was found and a fix, and changes nothing; ``fill`` then writes the
keys that the driver owns. Imports everything below ``hooks``.
"""
