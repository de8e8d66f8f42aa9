"""What stock verl needs on a machine without a GPU: a platform, and a replay buffer that polls faster.

Imports ``errors`` and ``upstream``; loaded with ``VERL_PLATFORM=cpu`` only.
"""
