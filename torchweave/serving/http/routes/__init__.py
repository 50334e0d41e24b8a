"""The addresses of the server, one file for each kind; each file has a `router`."""
