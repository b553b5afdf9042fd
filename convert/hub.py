"""Models by their name on the Hugging Face hub: through its cache, offline where that is asked for, at one revision.

A name that is a folder here is this folder; `org/model@revision` is a branch, tag or commit of a repository. One that
was renamed or replaced is refused: the hub would answer with another one's files.
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
_SUBFOLDERS = ("*/*",)  # other formats of the same weights, as a rule
_WEIGHTS = ("*.safetensors",)


class Source(NamedTuple):
    """Where a model is.

    Attributes:
        folder: On this machine.
        name: On the hub; None for a folder that is none of its.
        revision: The commit's hash there, or None.
    """

    folder: Path
    name: str | None = None
    revision: str | None = None

    @property
    def pinned(self) -> str:
        """A name that stays with this commit: "organisation/model@commit", or the folder."""
        return str(self.folder) if self.name is None or self.revision is None else f"{self.name}@{self.revision}"


def split(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Take "organisation/model@revision" apart; a folder, and a name without a revision, have none.

    Args:
        name: A folder, or a name on the hub.
    """
    text = os.fspath(name)
    repository, _, revision = (text, "", "") if _exists(Path(text)) else text.partition("@")
    return repository, revision or None


def fetch(name: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Source:
    """Find a model or adapter folder, and download it where it is a name on the hub.

    Args:
        name: A folder, "organisation/model" or "organisation/model@revision". What HF_HUB_OFFLINE, HF_HOME and
            HF_TOKEN say is respected.
        revision: Branch, tag or commit on the hub; None for its main branch as it is now (offline: as it was). Not both
            here and in the name.
        weights: Whether the files of weights are wanted too.

    Returns:
        The folder, and the commit that it is.

    Raises:
        ConvertError: No such folder and no such repository or revision, none in the cache while offline, a repository
            that goes by another name now, a revision of a folder, two revisions, or a hub that does not answer.
    """
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
    except Exception as error:  # of the HTTP library, which is another one with each version of the hub's
        reason = " ".join(str(error).split())[:300]
        raise ConvertError(
            f"{called}: no such folder, and the hub does not answer: {reason}; HF_HUB_OFFLINE=1 takes what its cache "
            "has"
        ) from None
    return Source(Path(where), text, Path(where).name)


def _exists(path: Path) -> bool:
    """Whether a path is there; one that is too long is not."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
