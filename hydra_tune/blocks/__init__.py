"""Blocks of a model: their weights are on a device while their operators need them, in PyTorch's own autograd graph.

May import devices, randomness, config and errors; nothing of trials, planning or the pool.
"""
