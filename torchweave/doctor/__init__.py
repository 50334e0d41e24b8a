"""The doctor: what keeps a module from being captured once, as one graph, and from running fast; each with place and fix.

A subject is looked at from three sides: run eagerly under watch (`eager`), traced by Dynamo with graph breaks and guards
allowed, so that everything behind the first problem is found too (`tracing`), and woven by the stack itself
(`weaving`). Each class of finding is drawn from what these saw: `trace_failures`, `graph_breaks`, `recompiles`,
`performance`. Source code is read only to tell causes apart, and only on lines that did run.
"""
