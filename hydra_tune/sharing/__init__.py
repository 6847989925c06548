"""Frozen weights that several trials have: which these are, and the one copy of them at each place.

May import blocks, devices, schedule and all below.
"""
