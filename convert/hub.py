"""Models by name on the Hugging Face hub: through its cache, offline if requested, at one revision.

An existing folder takes precedence; `org/model@revision` is a branch, tag or commit of a repository. A renamed or
replaced repository is refused: the hub would answer with another one's files.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from convert.errors import ConvertError, shorten, shown

PATTERNS = (
    *("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*", "chat_template*"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)
_SUBFOLDERS = ("*/*",)  # usually other formats of the same weights
_WEIGHTS = ("*.safetensors",)


class Source(NamedTuple):
    """The location of a model.

    Attributes:
        folder: Its local folder.
        name: Its name on the hub; None for a folder from elsewhere.
        revision: The commit's hash, or None.
    """

    folder: Path
    name: str | None = None
    revision: str | None = None

    @property
    def pinned(self) -> str:
        """The name with its commit, "organisation/model@commit", or the folder."""
        return str(self.folder) if self.name is None or self.revision is None else f"{self.name}@{self.revision}"


def split(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split "organisation/model@revision"; the revision of a folder or a bare name is None.

    Args:
        name: A folder, or a name on the hub.
    """
    text = os.fspath(name)
    repository, _, revision = (text, "", "") if _exists(Path(text)) else text.partition("@")
    return repository, revision or None


def fetch(name: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Source:
    """Find a model or adapter folder; download it if it is a name on the hub.

    Args:
        name: A folder, "organisation/model" or "organisation/model@revision". HF_HUB_OFFLINE, HF_HOME and HF_TOKEN
            apply.
        revision: Branch, tag or commit; None for the main branch's current commit (offline: the cached one). Not
            together with one in the name.
        weights: Whether to fetch the weight files too.

    Returns:
        The folder and its commit.

    Raises:
        ConvertError: An unknown folder, repository or revision; none in the cache while offline; a renamed repository;
            a revision of a folder; two revisions; or no answer from the hub.
    """
    if not isinstance(name, str | os.PathLike):
        raise ConvertError(f"expected a folder or a name on the hub, org/model, got {shown(name, 80)}")
    folder, called = Path(name), shorten(os.fspath(name))
    if "\0" in str(name) or (revision is not None and "\0" in revision):
        raise ConvertError(f"{shown(str(name))}: expected a folder or a name on the hub, got one with NUL in it")
    if _exists(folder):
        if revision is not None:
            raise ConvertError(f"{called}: revision: expected none, since this is a folder, got {shorten(revision)}")
        return Source(folder)
    text, named = split(name)
    if named is not None and revision is not None:
        raise ConvertError(f"{called}: revision: expected one, got {shorten(named)} and {shorten(revision)}")
    revision = revision or named
    parts = text.split("/")
    if len(parts) != 2 or text.startswith((".", "~", "/")) or "\\" in text or not all(parts):
        raise ConvertError(f"{called}: no such folder")
    return _download(called, text, revision, weights=weights)


def _download(called: str, text: str, revision: str | None, *, weights: bool) -> Source:
    """A repository at a revision, from the hub or its cache; `called` is what messages name."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = revision
    try:
        if not constants.HF_HUB_OFFLINE:
            info = HfApi().model_info(text, revision=revision)
            if info.id != text:
                raise ConvertError(
                    f"{called}: this repository is called {info.id} now: name that if it is what you mean"
                )
            wanted = info.sha
        where = snapshot_download(
            text,
            revision=wanted,
            allow_patterns=list(PATTERNS),
            ignore_patterns=[*_SUBFOLDERS, *(() if weights else _WEIGHTS)],
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        at = "" if revision is None else f" at {revision}"
        raise ConvertError(
            f"{called}: no such folder, and not{at} in the hub's cache, which is all there is offline"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ConvertError(f"{called}: no such folder, and the hub does not give it: {reason[:300]}") from None
    except (ConvertError, OSError):
        raise
    except Exception as error:  # of the HTTP library, which varies with the hub's version
        reason = " ".join(str(error).split())[:300]
        raise ConvertError(
            f"{called}: no such folder, and the hub does not answer: {reason}; HF_HUB_OFFLINE=1 takes what its cache "
            "has"
        ) from None
    return Source(Path(where), text, Path(where).name)


def _exists(path: Path) -> bool:
    """Whether a path exists; False if it is too long."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
