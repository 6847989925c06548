"""The main job, small enough for two cores: a sweep of models larger than the device, on real text."""
