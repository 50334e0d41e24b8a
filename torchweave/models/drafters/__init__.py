"""Drafters trained for a model: EAGLE-3 heads and the multi-token-prediction layers of checkpoints."""
