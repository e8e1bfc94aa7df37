"""Connections between ranks: sockets, TLS, the handshake, and reconnecting."""
