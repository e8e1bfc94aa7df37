"""Writes a run as one Perfetto file, and reads it back.

The file is plain, uncompressed Perfetto protobuf: TrackEvents with SLICE_BEGIN and SLICE_END. It
holds a whole `Recording`, so no other file is needed to read a run. Rules:

- An event's category is the name of its record type (`RECORD_TYPES`), and its debug annotations are
  the record's fields other than times. An evaluation has `evaluation` instead of `step`
  (`rrfp.trace.records`). A task is also annotated with its rank. Names are written out rather than
  interned, so that any reader of the format understands the file.
- A rank is one packet sequence. Its first packet clears the incremental state, because a viewer
  silently drops a sequence that does not. The run's settings are an instant of a sequence of their
  own; each rank's place in the layout is an instant of the rank's sequence.
- Each message has one arrow, by flow id: from send to receive to the task that consumes it.
- The last packet states how many records were written, which reveals a file cut short.
"""
