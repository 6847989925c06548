"""The process on a Ray node that has the devices: a pool, and trials in its threads. Imports Ray and `frameworks`.

`messages`, `pool_spec`, `pool_actor` and `pool_keeper` are also read in processes that have no torch, and import none.
"""
