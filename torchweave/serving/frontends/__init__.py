"""Several HTTP processes for the same engines: each reads requests and writes their answers.

The first process starts the engines and the other processes, and answers requests about the whole server (decision 0100).
"""
