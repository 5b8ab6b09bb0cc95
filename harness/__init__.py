"""Runs one scenario suite against many vLLM versions, each in its own container."""

__version__ = "0.1.0"
