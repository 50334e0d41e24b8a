"""Families whose calls begin with a name before arguments in JSON or a form of their own."""
