"""Draws plain data for people. Imports `config` and `errors`."""
