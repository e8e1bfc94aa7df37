"""How messages travel between ranks: the frames, the links, and what carries them."""
