"""The links between ranks as protocols alone: their frames, states and counts, and no socket."""
