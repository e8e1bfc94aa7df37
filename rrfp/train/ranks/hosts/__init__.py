"""Several hosts of one run: how they meet, hear each other, and bring their records together."""
