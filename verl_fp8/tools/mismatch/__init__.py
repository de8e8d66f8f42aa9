"""How far trainer and rollout are apart, and why: ``certify`` measures both, ``attribute`` one model's causes.

``causes`` makes variants of a model, ``probes`` records inside it, ``compare`` gives the figures.
"""
