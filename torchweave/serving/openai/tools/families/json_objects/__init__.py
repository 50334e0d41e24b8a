"""Families whose calls are JSON objects with a name and arguments."""
