"""Families whose arguments stand between tags."""
