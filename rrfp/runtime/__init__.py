"""One rank at run time: its worker, agreement, recorder and pace, and how it finds its peers.

`rrfp.runtime.link` is the protocol of its messages, `rrfp.runtime.net` connects its sockets, and
`rrfp.runtime.planes` carries large tensors beside them.
"""
