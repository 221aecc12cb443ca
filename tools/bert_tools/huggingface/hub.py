"""Published models, which are opened by their names on the Hugging Face hub.

huggingface_hub downloads only their safetensors, JSON files and vocabularies, and keeps a cache.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bert_tools.huggingface.reader import CONFIG, SINGLE, open_huggingface
from bert_tools.huggingface.tokenizer import ADDED_TOKENS, TOKENIZER_CONFIG
from bert_tools.huggingface.weights import Source
from mlperf_bert.checkpoint.weights_directory import is_hub_name
from mlperf_bert.errors import CheckpointError, one_line
from mlperf_bert.extras import require_packages
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

FILES = (CONFIG, SINGLE, *VOCABULARY_FILES, TOKENIZER_CONFIG, ADDED_TOKENS)


def open_weights(given: Path) -> Source:
    """Open a directory or a published model in Hugging Face's format, without reading the weights.

    The revision of a published model is printed, and is part of the source's origin. Raises
    ConfigError if huggingface_hub is not installed, and CheckpointError for all other problems.
    """
    if not is_hub_name(given):
        return open_huggingface(given)
    folder = _download(given)
    print(f"found {given} on the Hugging Face hub: revision {folder.name}", flush=True)
    if not (folder / SINGLE).exists():
        problem = f"has no {SINGLE} on the Hugging Face hub, and no other weights are downloaded"
        raise CheckpointError(str(given), problem, "pass a model that has this file")
    source = replace(open_huggingface(folder), name=given.parts[1].partition("@")[0])
    return replace(source, hub_name=str(given), hub_revision=folder.name)


def _download(given: Path) -> Path:
    """Return a published model's directory in the cache, named after the hash of the commit."""
    name, _, revision = str(given).partition("@")
    files = f"{name} --revision {revision}" if revision else name
    remedy = f"run `hf download {files} --local-dir DIR` on a machine with a network, and pass DIR"
    where = f"{given} (no such directory)"
    require_packages(where, "transformers", "huggingface_hub", otherwise=remedy)
    print(f"asking the Hugging Face hub for {given}", flush=True)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(FILES)))
    except Exception as error:  # the library's errors have no common base class
        said = one_line(f"{type(error).__name__}: {error}".partition("\n")[0])
        problem, remedy = f"cannot be downloaded ({said})", f"check the name, or {remedy}"
        raise CheckpointError(where, problem, remedy) from None


def is_origin(given: Path, origin: Mapping[str, str]) -> bool:
    """Return whether the origin in a checkpoint's manifest is `given`, without asking the hub.

    A directory may be gone. A published model may be named as before or by its resolved revision.
    """
    if hub_name := origin.get("hub_name"):
        resolved = f"{hub_name.partition('@')[0]}@{origin.get('hub_revision')}"
        return str(given) in (hub_name, resolved) and not given.exists()
    if given.exists():
        return open_huggingface(given).origin.items() <= origin.items()
    return given.absolute().name == origin.get("name")
