"""Routes of the server; each module has a `router`."""
