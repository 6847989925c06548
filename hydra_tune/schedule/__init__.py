"""Decides which shard of which trial computes next, and who has which bytes: a pure machine.

Events go in, instructions come out. Imports `config` and `errors`; no torch, clock, thread or I/O.
"""
