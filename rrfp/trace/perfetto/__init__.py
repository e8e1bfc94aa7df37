"""A run as one Perfetto file, and back.

The file is plain, uncompressed Perfetto protobuf: TrackEvents with SLICE_BEGIN and SLICE_END. It
holds all of a `Recording`, so nothing else is needed to read a run. Rules:

- An event's category is the name of its record type (`RECORD_TYPES`), and its debug annotations are
  the record's fields other than times. An evaluation has `evaluation` instead of `step`
  (`rrfp.trace.steps`). A task is also annotated with its rank. Names are written out rather than
  interned, so that any reader of the format understands the file.
- A rank is one packet sequence. Its first packet clears the incremental state, because a viewer
  silently drops a sequence that does not. The run's settings are an instant of a sequence of their
  own; each rank's place in the layout is an instant of the rank's sequence.
- Each message has one arrow, by flow id: from send to receive to the task that consumes it.
- The last packet states how many records were written, which reveals a file cut short.
"""
