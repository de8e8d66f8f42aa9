"""What this package relies on in verl, vLLM, TransferQueue, TransformerEngine and Megatron.

``contract`` compares versions and symbols with what is installed, ``symbols`` and ``symbols_megatron`` are the
table it reads, ``patched`` says whether a hook of ours stands in a module's own source. Imports ``errors`` only.
"""
