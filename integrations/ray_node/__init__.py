"""The process on a Ray node that has the devices: a pool, and trials in its threads. Imports Ray and `frameworks`.

`messages`, `pool_spec` and `pool_actor` are also read in processes that have no torch, and import none.
"""
