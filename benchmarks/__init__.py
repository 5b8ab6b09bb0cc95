"""Measured ratios, never asserted: the machines are noisy."""
