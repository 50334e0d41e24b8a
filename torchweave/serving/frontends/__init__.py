"""Several HTTP processes before the same engines: each reads requests, and writes the answers to its own.

The first one starts the engines and the others, and answers what is about the server as a whole; see decision 0100.
"""
