"""What a model needs of a device and how it is cut for that: measured by a trial's pilot, shared by trials alike.

May import blocks, devices, randomness, schedule, config and errors; nothing of trials or the pool.
"""
