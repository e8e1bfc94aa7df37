"""Exporters of a run's figures, one file for each system."""
