"""Which send, receive and task belong to one message, and the id of its arrow."""

from typing import NamedTuple

from rrfp.trace.records import ReceiveRecord, SendRecord, TaskRecord


class MessageKey(NamedTuple):
    """A message of the run: number `sequence` on the directed link source -> destination."""

    source: int
    destination: int
    sequence: int

    @property
    def flow_id(self) -> int:
        """The id of the message's arrow, unique in the run for up to 65,536 ranks and 4 G messages
        per link."""
        ranks = (self.source & 0xFFFF) << 16 | self.destination & 0xFFFF
        return ranks << 32 | self.sequence & 0xFFFFFFFF


class TaskKey(NamedTuple):
    """A task on one rank, by which a received message finds its consumer."""

    step: int
    kind: str
    stage: int
    microbatch: int


def sent_by(rank: int, send: SendRecord) -> MessageKey:
    return MessageKey(rank, send.peer, send.sequence)


def received_by(rank: int, receive: ReceiveRecord) -> MessageKey:
    return MessageKey(receive.peer, rank, receive.sequence)


def key_of(record: TaskRecord | SendRecord | ReceiveRecord) -> TaskKey:
    """The task itself, or the task that consumes the message."""
    return TaskKey(record.step, record.kind, record.stage, record.microbatch)
