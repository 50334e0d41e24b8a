"""Auto multi-stream: a piece is spread over several CUDA streams where its graph leaves room for that.

hazards   which node must wait for which: values, reads after writes, writes after reads and writes, through any alias
tasks     nodes that belong together (what Inductor would fuse, what a chain keeps in order) become one task
cost      what a task takes: measured, else by the kind of its operations
schedule  tasks onto streams: longest path first, onto a stream that is free when the inputs are ready
program   runs of tasks between synchronisation points, and the events that order them
simulate  when each run begins and ends, against one after the other
build     each run as a piece of its own, called from straight-line code over `streams`
"""
