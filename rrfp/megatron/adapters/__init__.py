"""What rrfp needs of Megatron-Core, in its own terms: one module a concern.

An adapter looks at what the installed Megatron-Core has, and never at its version: distributions
patch and backport. `compatibility` checks first that it is one of the known forms.
"""
