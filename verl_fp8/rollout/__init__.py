"""FP8 in vLLM: ``arguments`` and ``environment`` start it, ``worker`` is the receiving half of the weight sync.

``derived`` makes again what vLLM computes from weights after loading. ``linear_*`` and ``experts_*`` are the layers on
GPU and CPU, ``operators`` their torch operators, ``serving`` what a process runs. Loaded in vLLM's processes; never
imports ``trainer``.
"""
