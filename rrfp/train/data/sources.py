"""Finds and checks the data that the settings name, without torch, so that the launcher reports
problems before it starts any process."""

from rrfp.train.data.corpus import count_samples, document_lengths
from rrfp.train.data.documents import Documents
from rrfp.train.data.picture_folder import PictureFolder
from rrfp.train.data.scenes import Scenes
from rrfp.train.setting_groups import ModelKind
from rrfp.train.settings import TrainSettings


def open_documents(settings: TrainSettings) -> Documents:
    """The images and texts of a multimodal run. Raises UsageError if the folder has none."""
    return (
        Scenes(settings)
        if settings.data.path is None
        else PictureFolder(settings.data.path, settings)
    )


def check_data(settings: TrainSettings) -> None:
    """Raise UsageError if the data cannot be trained on, as far as headers show."""
    if settings.model.kind == ModelKind.VLM:
        documents = open_documents(settings)
        if isinstance(documents, PictureFolder):
            documents.check()
        return
    count_samples(
        document_lengths(settings.data.path),
        settings.data.seq_length,
        variable_lengths=settings.data.variable_lengths,
    )
