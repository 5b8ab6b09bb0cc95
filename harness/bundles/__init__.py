"""Bundles: targets, suite and plan as files, for machines that have neither Docker nor a network."""
