"""Which data the settings name, and whether it can be trained on; found without torch, so that the
launcher says what is wrong before it starts any process."""

from rrfp.megatron.corpus import count_samples, document_lengths
from rrfp.megatron.documents import Documents
from rrfp.megatron.picture_folder import PictureFolder
from rrfp.megatron.scenes import Scenes
from rrfp.megatron.settings import ModelKind, TrainSettings


def open_documents(settings: TrainSettings) -> Documents:
    """The images and texts of a multimodal run. Raises UsageError for a folder that has none."""
    return Scenes(settings) if settings.data is None else PictureFolder(settings.data, settings)


def check_data(settings: TrainSettings) -> None:
    """Raise UsageError when the data cannot be trained on, as far as its heads tell."""
    if settings.model == ModelKind.VLM:
        documents = open_documents(settings)
        if isinstance(documents, PictureFolder):
            documents.check()
        return
    count_samples(
        document_lengths(settings.data),
        settings.seq_length,
        variable_lengths=settings.variable_lengths,
    )
