"""Choices by measurement: a clock that times candidates as they will run, tables of what it found, and the tuner between them."""
