"""Families whose calls are written in Python."""
