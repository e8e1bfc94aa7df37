"""A run as one Perfetto file, and back.

The file is plain, uncompressed Perfetto protobuf: TrackEvents with SLICE_BEGIN and SLICE_END, and
it holds everything of a `Recording`, so that nothing else is needed to read a run. Rules:

- An event's category is the name of its record type (`RECORD_TYPES`), and its debug annotations are
  the record's fields, times apart; `evaluation` stands in place of the `step` of an evaluation
  (`rrfp.trace.steps`). A task's also name its rank. Names are written out, not
  interned: any reader of the format understands the file.
- A rank is one packet sequence; its first packet clears the incremental state, for a viewer drops
  a sequence without that in silence. The run's settings are an instant of a sequence of their own,
  each rank's place in the layout an instant of the rank's sequence.
- One arrow a message, by flow id: send, receive, and the task that consumes it, where it ends.
- The last packet states how many records were written, so that a file cut short is told.
"""
