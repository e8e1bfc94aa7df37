"""Live figures of a running job, and detection of slow places, from the files that it writes."""
