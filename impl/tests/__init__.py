"""Promises of the implementation, one file for each module; those that need Megatron say so."""
