"""All readers, by name."""

from tests.fuzz import data_readers, given_readers, import_readers, run_readers
from tests.fuzz.reader import Reader

READERS: dict[str, Reader] = {
    reader.name: reader
    for readers in (
        run_readers.READERS,
        given_readers.READERS,
        import_readers.READERS,
        data_readers.READERS,
    )
    for reader in readers
}
