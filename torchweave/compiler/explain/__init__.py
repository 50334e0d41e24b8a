"""Explanation of a compilation: plain data from the plan and the report's events (`facts`), and an HTML page (`page`).

`explain --json` prints the data, and `explain.schema.json` in this folder describes it. Plan and events are its only sources.
"""
