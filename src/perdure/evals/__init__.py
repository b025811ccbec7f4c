"""Measures agents against cases."""
