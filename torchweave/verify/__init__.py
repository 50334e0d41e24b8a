"""Verification against transformers: compare the tokens of tiny models of every architecture with its eager model."""

import torchweave.models  # noqa: F401  imports transformers first, without unused packages
