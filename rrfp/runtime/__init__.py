"""One rank at run time: its worker, agreement, recorder and pace, and how it finds its peers.

`rrfp.runtime.net` moves its messages.
"""
