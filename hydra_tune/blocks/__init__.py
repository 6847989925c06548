"""A block's weights on a device for as long as its operators need them, in PyTorch's own graph.

May import devices, randomness, config and errors; nothing of trials, plans or the pool.
"""
