"""One rank at run time: its worker, its group's agreement, its recorder, and the rendezvous.

`rrfp.runtime.link` is the protocol between two ranks, `rrfp.runtime.net` connects their sockets,
`rrfp.runtime.planes` carries large tensors, and `rrfp.runtime.device` is the device below them.
"""
