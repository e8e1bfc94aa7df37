"""A recording played again in virtual time: as costs, under another policy, or without jitter."""
