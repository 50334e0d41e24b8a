"""Verification against transformers: tiny models of every architecture, compared token by token with its eager model."""

import torchweave.models  # noqa: F401  it imports transformers first, without the modules that no engine runs
