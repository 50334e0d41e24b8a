"""Autotuning: a clock that times candidates in CUDA graphs, tables of results, and the tuner."""
