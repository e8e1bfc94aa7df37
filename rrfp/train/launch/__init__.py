"""The processes of a run's ranks: how they start, meet, form groups, fail and end."""
