"""Batches of text: the tokens of a corpus that a microbatch sees.

No sample comes twice in an epoch.
"""

from collections.abc import Callable

import numpy as np
import torch

from rrfp.train.data.batches import Batch
from rrfp.train.data.corpus import Corpus, Tokens, count_samples
from rrfp.train.data.sampling import sample_at
from rrfp.train.data.sources import open_corpus
from rrfp.train.settings import TrainSettings


class TextData:
    """A corpus as training data; nothing is held out."""

    heldout: Callable[[int], Batch] | None = None

    def __init__(self, settings: TrainSettings) -> None:
        """Raises UsageError if there is no text to train on."""
        self._corpus = open_corpus(settings.data)
        self._settings = settings
        self.vocab_size = self._corpus.vocab_size

    def batches(self, dp_rank: int) -> "TextBatches":
        """The batches of a replica. Raises UsageError if the text is too short for one sample."""
        return TextBatches(self._corpus, self._settings, dp_rank)


class TextBatches:
    """The batches of text of one data-parallel replica.

    By default documents are packed end to end and cut into windows of `seq_length`. With
    `variable_lengths` a row is one document, or `seq_length` tokens of it from a random position;
    the microbatch is as long as its longest row, rounded up to a multiple of `tp`.
    """

    def __init__(self, corpus: Corpus, settings: TrainSettings, dp_rank: int) -> None:
        """Raises UsageError if the corpus is too small for one sample."""
        self._corpus = corpus
        self._settings = settings
        self._dp_rank = dp_rank
        self._ends: Tokens = np.cumsum(corpus.lengths)
        self._long_enough: Tokens = np.flatnonzero(corpus.lengths > 1)
        self._num_samples = count_samples(
            corpus.lengths,
            settings.data.seq_length,
            variable_lengths=settings.data.variable_lengths,
        )

    def batch(self, step: int, microbatch: int) -> Batch:
        """This microbatch of the step; equal arguments give equal batches, on every rank."""
        settings = self._settings
        first = (
            step * settings.layout.num_replicas + self._dp_rank
        ) * settings.data.microbatches + microbatch
        first *= settings.data.micro_batch_size
        indices = range(first, first + settings.data.micro_batch_size)
        if settings.data.variable_lengths:
            rows = [self._document(index) for index in indices]
            longest = max(len(row) for row in rows) - 1
            length = -(-longest // settings.layout.tp) * settings.layout.tp
        else:
            rows = [self._window(index) for index in indices]
            length = settings.data.seq_length
        return _batch(rows, length)

    def _sample(self, index: int) -> int:
        """The sample at a place of the endless sequence of samples."""
        return sample_at(index, self._num_samples, self._settings.run.seed)

    def _window(self, index: int) -> Tokens:
        start = self._sample(index) * self._settings.data.seq_length
        stop = start + self._settings.data.seq_length + 1
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        parts = []
        for document in range(first, last + 1):
            length = int(self._corpus.lengths[document])
            begin = int(self._ends[document]) - length
            parts.append(
                self._corpus.tokens(document, max(start - begin, 0), min(stop - begin, length))
            )
        return np.concatenate(parts)

    def _document(self, index: int) -> Tokens:
        document = int(self._long_enough[self._sample(index)])
        length = int(self._corpus.lengths[document])
        spare = length - (self._settings.data.seq_length + 1)
        start = 0
        if spare > 0:
            start = int(np.random.default_rng((self._settings.run.seed, index)).integers(spare + 1))
        stop = min(start + self._settings.data.seq_length + 1, length)
        return self._corpus.tokens(document, start, stop)


def _batch(rows: list[Tokens], length: int) -> Batch:
    # Padding is token 0, which every vocabulary has.
    padded = np.zeros((len(rows), length + 1), np.int64)
    counts = np.zeros((len(rows), length), np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        counts[index, : len(row) - 1] = 1.0
    tokens = torch.from_numpy(padded)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.from_numpy(counts),
        position_ids=torch.arange(length).expand(len(rows), length),
    )
