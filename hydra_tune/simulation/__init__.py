"""Simulates sweeps: workloads, their costs, baselines, and the scheduler's machine driven by a simulated clock.

Imports `schedule` and below; no torch.
"""
