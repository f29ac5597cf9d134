"""Statements that arithmetic decides: one file a claim."""
