"""Which data the settings name, and whether it can be trained on; found without torch, so that the
launcher says what is wrong before it starts any process."""

from rrfp.train.data.corpus import count_samples, document_lengths
from rrfp.train.data.documents import Documents
from rrfp.train.data.picture_folder import PictureFolder
from rrfp.train.data.scenes import Scenes
from rrfp.train.groups import ModelKind
from rrfp.train.settings import TrainSettings


def open_documents(settings: TrainSettings) -> Documents:
    """The images and texts of a multimodal run. Raises UsageError for a folder that has none."""
    return (
        Scenes(settings)
        if settings.data.path is None
        else PictureFolder(settings.data.path, settings)
    )


def check_data(settings: TrainSettings) -> None:
    """Raise UsageError when the data cannot be trained on, as far as its heads tell."""
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
