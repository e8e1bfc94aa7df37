"""What a user names, found by its name or read from a file: hints and admission orders."""
