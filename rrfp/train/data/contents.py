"""What the data of a run are, by content: two runs with the same contents train on the same items,
wherever the files lie.

Imports no torch: the launcher compares contents before it starts any process.
"""

import hashlib

from rrfp.train.data.picture_folder import PictureFolder
from rrfp.train.data.sources import document_lengths, open_documents
from rrfp.train.data.token_cache import encoded
from rrfp.train.setting_groups import ModelKind
from rrfp.train.settings import TrainSettings

_DRAWN = "scenes drawn at run time"


def data_contents(settings: TrainSettings) -> dict[str, str]:
    """What identifies the data, by the flag of the setting that names it.

    `data` is a SHA-256 over an index of the documents, not over every byte: for text the number of
    tokens of each, for images their captions, paths and sizes in bytes. `tokenizer` is the SHA-256
    of its file, `end_of_document` the token. Scenes that are drawn follow from the settings and are
    only named. Raises UsageError for data that cannot be used.
    """
    if settings.model.kind is ModelKind.VLM:
        documents = open_documents(settings)
        return {"data": documents.digest() if isinstance(documents, PictureFolder) else _DRAWN}
    lengths = document_lengths(settings.data)
    found = {"data": hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()}
    if settings.data.tokenizer is not None:
        tokenizer = encoded(settings.data).tokenizer
        found["tokenizer"] = str(tokenizer["sha256"])
        found["end_of_document"] = str(tokenizer["end_of_document"])
    return found
