"""How a run ended, by what its ranks left, and what its trace therefore lacks."""
