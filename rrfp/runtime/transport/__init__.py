"""How messages travel between ranks: the frames, and what carries those of a link."""
