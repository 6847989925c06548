"""Ray Tune's own processes: what the driver and a trial's proxy do. Imports Ray and `ray_node`; no torch.

A trial of Tune's is an actor. Over a pool it is a thin proxy without a device: the trial itself trains in its node's
pool, whose process has the devices (`ray_node`).
"""
