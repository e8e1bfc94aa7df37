"""Resolves what a user names: hints and admission orders, built in or read from files."""
