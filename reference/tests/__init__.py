"""Promises of the oracle, one file for each kind."""
