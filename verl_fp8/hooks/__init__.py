"""Where verl and vLLM call this package: entry points (``verl_plugin``, ``vllm_plugin``) and Hydra's ``targets``.

``register`` puts our classes into verl's registries, ``leftovers`` clears up after a run. Only ``tools`` stand
above.
"""
