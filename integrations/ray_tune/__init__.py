"""Ray Tune, its own processes: what the driver and a trial's proxy do."""
