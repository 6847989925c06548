"""Says before a run what it would take: `hydra_tune.plan`."""
