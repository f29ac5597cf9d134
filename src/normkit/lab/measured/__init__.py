"""Statements that an experiment decides, over seeds: one file a claim."""
