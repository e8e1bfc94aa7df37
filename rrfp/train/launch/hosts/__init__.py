"""Several hosts of one run: rendezvous, status, and the records they bring together."""
