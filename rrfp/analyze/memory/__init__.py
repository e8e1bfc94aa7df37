"""What a run's ranks kept in memory."""
