"""What stands between a command and the terminal."""
