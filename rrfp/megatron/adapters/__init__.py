"""Adapters to Megatron-Core, one module per concern.

An adapter checks which names the installed Megatron-Core has, and never its version, because
distributions patch and backport. `compatibility` first checks that these names have a known form.
"""
