"""The in-container half of vllm-matrix: events, engine adapter, oracles, and the runner around the checks.

Parses on Python 3.10 and never imports ``harness``: the two halves share file formats only (docs/formats.md).
"""
