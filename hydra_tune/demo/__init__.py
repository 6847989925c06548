"""The main job of `make demo`, small enough for two cores: a sweep over GPTs larger than the device, and its report.

Imports the public names of `hydra_tune`, and `config`.
"""
