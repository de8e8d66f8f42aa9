"""``verl-fp8 doctor``: ``facts`` looks, in a process of its own; ``diagnosis`` judges; ``command`` asks every node
and prints.
"""
