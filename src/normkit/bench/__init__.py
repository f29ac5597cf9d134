"""Benchmarks: named providers over a grid of cases, interleaved in one run, checked before they are timed."""
