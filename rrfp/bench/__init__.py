"""The race: the paper's questions as presets, their plan, and what came of it."""
