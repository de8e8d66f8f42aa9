"""How far trainer and rollout are apart, and why: ``certify`` measures both, ``attribute`` one model's causes.

``causes`` changes one operation of a model, ``probes`` records inside it, ``compare`` says how far two
forwards are apart, ``bands`` how far they may be.
"""
