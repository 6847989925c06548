"""Carries out what the machine decides: leases, promotions ahead, waiting, the report. Imports `planning` and below."""
