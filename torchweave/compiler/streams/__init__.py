"""Auto multi-stream: run a piece on several CUDA streams where its graph has parallel branches.

tasks     hazards between nodes (values, RAW, WAR, WAW through aliases), and groups of nodes that stay together, by weight
schedule  assign tasks to streams: longest path first, on a stream that is free when the inputs are ready; runs of tasks between
          synchronization points, their events, and the predicted timeline
build     build each run as its own piece, called from straight-line code over the streams
backends  CUDA streams, and a checker for race conditions without a GPU
"""
