"""The machine on paper: sweeps, what they cost, and the machine driven by a clock. Imports `schedule`, no torch."""
