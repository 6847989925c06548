"""Carries out what the scheduler's machine decides: leases, promotions ahead, waiting, the report.

May import planning, blocks, devices, randomness, simulation, schedule, show, process, config and errors; nothing of
trials.
"""
