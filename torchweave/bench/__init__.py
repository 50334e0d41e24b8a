"""Measurements and results of `torchweave bench`."""
