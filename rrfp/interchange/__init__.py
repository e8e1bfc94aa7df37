"""Other people's traces: read as recordings, and our recordings written in their forms."""
