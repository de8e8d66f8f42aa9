"""The commands of ``verl-fp8``: ``check`` and ``explain`` here, ``doctor``, ``mismatch`` (certify, attribute) and
``runs`` (replay, report).

``overrides`` is what each starts with, ``page`` the HTML they share.
"""
