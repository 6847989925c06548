"""The scheduler as a pure machine, and its vocabulary: events in, instructions out; no torch, clock, thread or I/O."""
