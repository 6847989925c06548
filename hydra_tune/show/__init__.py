"""Draws plain data for people: the timeline. Imports `config` and `errors`."""
