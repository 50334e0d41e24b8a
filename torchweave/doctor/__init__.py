"""The doctor: finds the lines that keep a module from capture as one graph or from running fast, with cause and fix.

A subject is examined in three ways: an instrumented eager run (`eager_run`), a Dynamo trace that allows graph breaks and guards,
to find problems after the first one (`tracing`), and a compilation by the stack (`compile_run`). Findings of each kind come
from their results: `trace_failures`, `graph_breaks`, `recompiles`, `performance`. Source code serves only to distinguish
causes, and only on executed lines.
"""
