"""Carries out the decisions of the scheduler's machine. Owns leases, promotions ahead, waiting trials and the report.

May import planning, blocks, devices, randomness, simulation, schedule, show, process, config and errors; nothing of
trials.
"""
