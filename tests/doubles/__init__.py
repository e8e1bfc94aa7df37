"""Test doubles of a device and of a transport."""
