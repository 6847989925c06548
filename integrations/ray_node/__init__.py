"""Ray Tune, the process with the devices: a node's pool, and the trials that run in it."""
