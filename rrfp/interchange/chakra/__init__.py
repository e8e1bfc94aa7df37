"""A run read from Chakra execution traces."""
