"""What was decided, told: from a plan and a report's events to plain data (`facts`), and from that to a page (`page`).

The data is what `explain --json` prints and `explain.schema.json`, beside this file, describes. Nothing is looked up
elsewhere: what no event says is not told.
"""
