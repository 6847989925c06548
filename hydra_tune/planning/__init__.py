"""Measures what a model needs of a device, and decides how the model is cut.

A trial's pilot measures. Trials of the same architecture share the numbers.

May import blocks, devices, randomness, schedule, config and errors; nothing of trials or the pool.
"""
