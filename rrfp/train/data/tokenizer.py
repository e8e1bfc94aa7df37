"""Tokenizers of the library `tokenizers`, from their files alone: nothing is downloaded.

Imports the library, which is an extra, only when a tokenizer is opened.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.inputs.text_files import read_text
from rrfp.train.data.indexed import MOST_TOKENS

_FILE = "tokenizer.json"

_CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside it that may say which token ends a text."""

_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """Turns text into tokens, always into the same ones."""

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        """`path` is what --tokenizer names, `end_of_document` what --end-of-document does.

        Raises UsageError for what is no tokenizer, and for one that says nothing about the end of a
        document; RrfpError if the library is missing.
        """
        self.file = tokenizer_file(path)
        self._tokenizer = _opened(self.file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"the tokenizer {self.file} has no tokens; name another one")
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the highest token."""
        if self.vocab_size > MOST_TOKENS:
            raise UsageError(
                f"the tokenizer {self.file} has the token {self.vocab_size - 1}; "
                f"{MOST_TOKENS - 1} is the largest that is taken"
            )
        self.end_of_document = _end_of(self.file, vocabulary, end_of_document)
        first, last = self._frame(vocabulary)
        end = vocabulary[self.end_of_document]
        self.first = first
        """What the tokenizer puts in front of a text, such as a beginning of sequence."""
        self.last = last if last[-1:] == [end] else [*last, end]
        """What it puts behind a text, and the end of the document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without `first` and `last`. Raises what the library raises for
        a text that it cannot encode."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def _frame(self, vocabulary: dict[str, int]) -> tuple[list[int], list[int]]:
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        # Any text shows it that has a token of its own.
        for probe in chain("a", vocabulary):
            encoding = self._tokenizer.encode(probe)
            is_text = [mask == 0 for mask in encoding.special_tokens_mask]
            if any(is_text):
                num_first, num_last = is_text.index(True), is_text[::-1].index(True)
                return encoding.ids[:num_first], encoding.ids[len(is_text) - num_last :]
        raise UsageError(f"the tokenizer {self.file} encodes no text; name another one")


def tokenizer_file(path: Path) -> Path:
    """The file of the tokenizer that --tokenizer names: the file itself, or that of a folder.
    Raises UsageError if there is none."""
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {path}, and no tokenizer is downloaded by its name; give "
            f"--tokenizer a {_FILE}, or a folder that holds one (save_pretrained of a fast "
            "tokenizer)"
        )
    if not path.is_dir():
        return path
    file = path / _FILE
    if not file.is_file():
        raise UsageError(
            f"the folder {path} holds no {_FILE}; name the tokenizer's file, or save one there "
            "(save_pretrained of a fast tokenizer)"
        )
    return file


def named_end(file: Path) -> str | None:
    """The end of a text as the files beside the tokenizer's say it. Raises UsageError for a file
    that cannot be read."""
    for name in _CONFIGURATIONS:
        beside = file.with_name(name)
        if beside.is_file():
            told = _table(beside)
            token = told.get("eos_token")
            # Some write a token with its properties.
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def _end_of(file: Path, vocabulary: dict[str, int], asked: str | None) -> str:
    named = named_end(file) if asked is None else asked
    if named is None:
        named = next((each for each in _USUAL_ENDS if each in vocabulary), None)
    if named is None:
        raise UsageError(
            f"the tokenizer {file} does not say which token ends a document; name it with "
            "--end-of-document"
        )
    if named not in vocabulary:
        raise UsageError(
            f"the tokenizer {file} has no token '{named}' to end a document with; name one with "
            "--end-of-document"
        )
    return named


def _table(file: Path) -> dict[str, Any]:
    text = read_text(str(file), "tokenizer")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tokenizer {file} is not JSON ({error}); name another one") from None
    if not isinstance(told, dict):
        raise UsageError(f"the tokenizer {file} is no JSON object; name another one")
    return told


def _opened(file: Path) -> Any:
    told = _table(file)
    model = told.get("model")
    dropout = model.get("dropout") if isinstance(model, dict) else None
    if dropout:
        raise UsageError(
            f"the tokenizer {file} leaves merges out by chance (a dropout of {dropout}), so that "
            "no two runs would see the same tokens; set its model's dropout to null"
        )
    try:
        import tokenizers
    except ImportError:
        raise RrfpError(
            "--tokenizer needs the package tokenizers, which this installation lacks; install the "
            "extra 'tokenizers' (pip install 'rrfp[tokenizers]')"
        ) from None
    try:
        opened = tokenizers.Tokenizer.from_str(json.dumps(told))
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(
            f"{file} is no tokenizer of the library tokenizers ({first_line(str(error))}); name a "
            f"{_FILE}"
        ) from None
    # Both are meant for batches of a model, and would lose text or add to it.
    opened.no_truncation()
    opened.no_padding()
    return opened
