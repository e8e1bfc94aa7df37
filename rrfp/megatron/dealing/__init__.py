"""Deals the global batch of a real step to the data-parallel replicas (`admit_across`)."""
