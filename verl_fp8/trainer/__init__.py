"""FP8 in verl's training engines: ``convert`` swaps a model's layers, one backend a file (``reference``, ``te``,
``scaled_mm``).

``engine_fsdp`` and ``engine_megatron`` are verl's engines with it, ``checkpoint`` keeps the recipe beside the
weights. Never imports ``rollout``.
"""
