"""Opens the data of a run."""

from rrfp.train.data.batches import Data
from rrfp.train.data.image_batches import ImageData
from rrfp.train.data.sources import open_documents
from rrfp.train.data.text_batches import TextData
from rrfp.train.setting_groups import ModelKind
from rrfp.train.settings import TrainSettings


def open_data(settings: TrainSettings) -> Data:
    """Open the data that these settings train on. Raises UsageError if there is none."""
    if settings.model.kind == ModelKind.VLM:
        return ImageData(open_documents(settings), settings)
    return TextData(settings)
