"""FP8 in vLLM: ``arguments`` and ``environment`` start it, ``worker`` loads and checks every sync.

``linear_*`` and ``experts_*`` are the layers on GPU and CPU, ``operators`` their torch operators, ``serving`` what
a process runs. Loaded in vLLM's processes; never imports ``trainer``.
"""
