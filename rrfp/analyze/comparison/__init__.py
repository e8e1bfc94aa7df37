"""What two runs have to be asked before they are compared, and what their comparison says."""
