"""Somebody's own training job: our schedule put in, and the job recorded."""
