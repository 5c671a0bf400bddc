"""Models of the Hugging Face hub, named as owner/name."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from distiller.errors import UserError
from distiller.storage.packaged_files import search_note
from distiller.storage.saved_model import TRANSFORMERS_NAME, index_of
from distiller.storage.weight_files import read_header

OTHER_FORMS = (
    *("*.bin", "*.ckpt", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot"),
    *("*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*", "*.non_ema.*", "*.non_ema-*"),
)
"""Patterns of files that are never read: pickles, other frameworks' weights, and variants of a model's weights."""


def is_other_form(name: str) -> bool:
    """Whether a file of this name is one that is never read."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OTHER_FORMS)


def looks_like_hub_id(name: str) -> bool:
    """Whether a recipe's path has the form of a hub id, owner/name; a folder of that name takes precedence."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~"))


def find_root(
    section: str, path: str, local: Path, revision: str | None, patterns: Sequence[str], content: str
) -> tuple[Path, bool]:
    """The folder that `SECTION.path` means, and whether it is one of the hub's cache.

    Args:
        path: a folder or a hub id, as the recipe has it; `local` is where it lies if it is a folder.
        patterns: the files that are downloaded of a hub's model.
        content: what the folder holds, for messages, such as config.json.

    Raises:
        UserError: there is neither, or a revision is given for a folder.
    """
    if os.path.isdir(local):
        if revision is not None:
            raise UserError(f"{section}.revision is {revision} and {section}.path {path} a folder; remove it")
        return local, False
    if os.path.exists(local):
        raise UserError(f"{section}.path: {path} is a file; give the folder that holds {content}")
    if not looks_like_hub_id(path):
        raise UserError(f"{section}.path: {path} is neither a folder nor a hub id (owner/name){search_note(local)}")
    return download(section, path, revision, patterns), True


def download(section: str, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Makes the files that match and are not `OTHER_FORMS` present, and returns the folder that holds them.

    Args:
        section: the recipe's section that `name` and `revision` are from, for messages.

    Raises:
        UserError: every failure, in one line that names the id and the way to work offline.
    """
    where = search_note(Path(name))
    offline = "give a folder"
    if not constants.HF_HUB_OFFLINE:
        offline = "to work offline, set HF_HUB_OFFLINE=1 with the model in the local cache, or give a folder"
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(OTHER_FORMS))
        )
    except GatedRepoError as error:
        raise UserError(
            f"{section}.path: {name} is gated: accept its terms on the hub and log in with `hf auth login`; {offline}"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{section}.revision: {name} has no revision {revision}; {offline}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{section}.path: {name} is no folder here and unknown on the hub (or private: `hf auth login`){where}; "
            f"{offline}"
        ) from error
    except Exception as error:
        # huggingface_hub passes on errors of its HTTP client, which is a different package in different versions.
        why = "offline mode is on and it is not in the local cache"
        if not constants.HF_HUB_OFFLINE:
            why = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
        raise UserError(
            f"{section}.path: {name} is no folder here and cannot be fetched ({why}){where}; {offline}"
        ) from error


def stored_names(name: str, revision: str | None, root: Path, inside: str) -> set[str]:
    """The names of a transformers model's tensors, from its header alone, which is fetched if it is not here.

    Args:
        root: the folder with its JSON files.
        inside: the folder within the repository, with a slash behind it, or nothing.

    Without a whole file, the names of its index.

    Raises:
        UserError: the hub does not say whether there is a whole file, and the weights are not in the local cache.
    """
    if (root / TRANSFORMERS_NAME).is_file():
        return set(read_header(root / TRANSFORMERS_NAME))
    index = index_of(root)
    # What is in the local cache is all that can be read offline, and it is what will be read.
    if is_offline() or (index and all((root / file).is_file() for file in index.values())):
        return set(index)
    try:
        found = HfApi().parse_safetensors_file_metadata(name, f"{inside}{TRANSFORMERS_NAME}", revision=revision)
        return set(found.tensors)
    except EntryNotFoundError:
        return set(index)
    except Exception as error:
        # Any error of the HTTP client. Tied weights are found by these names, so they cannot be guessed.
        why = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
        raise UserError(
            f"{name}: the names of its tensors cannot be read from the hub ({why}); try again, or set "
            "HF_HUB_OFFLINE=1 with the model in the local cache"
        ) from error


def is_offline() -> bool:
    """Whether the hub must not be asked (HF_HUB_OFFLINE), so that only the local cache can be read."""
    return constants.HF_HUB_OFFLINE


def listed_files(name: str, revision: str | None) -> frozenset[str]:
    """The files of a repository; empty where the hub cannot be asked."""
    if is_offline():
        return frozenset()
    try:
        return frozenset(HfApi().list_repo_files(name, revision=revision))
    except Exception:
        # Any error of the HTTP client: the model's JSON files came from the local cache then.
        return frozenset()


def check_listed(names: frozenset[str], folder: str, library_name: str, origin: str) -> None:
    """Raises UserError for a repository that holds weights only under names by which no library reads them.

    Args:
        names: the repository's files; empty where they are not known, and nothing is refused.
        folder: the model's folder within the repository; '' for its root.
        library_name: the file name of unsharded weights in the model's library.
        origin: what the message begins with.
    """
    parent = PurePosixPath(folder)
    readable = {str(parent / name) for name in (library_name, f"{library_name}.index.json")}
    if names and not readable & names:
        others = sorted(PurePosixPath(name).name for name in names if PurePosixPath(name).parent == parent)
        raise UserError(
            f"{origin}: holds no weights in {library_name} or its shards (other names and formats are not read); it "
            f"has {', '.join(others) or 'nothing'}"
        )
