"""The protocol of one directed link, without sockets: frames, acknowledgement, both ends."""
