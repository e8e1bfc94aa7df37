"""What is recorded, how ranks spill it, and the Perfetto file it becomes."""
