"""Uploading a model to the hub: what `saving` writes, into one commit; a card of the user's that is there stays."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.adapter_config import CONFIG as ADAPTER_CONFIG
from convert.card import CARD, is_foreign, renamed
from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel
from fastjax.language_model.saving import save_pretrained, save_pretrained_gguf, save_pretrained_merged


def push_to_hub(
    model: LanguageModel,
    repo_id: str,
    tokenizer: Any = None,
    *,
    token: str | None = None,
    private: bool = False,
    commit_message: str | None = None,
) -> str:
    """Upload what `save_pretrained` writes.

    Args:
        model: one of which something is trained.
        repo_id: organisation/name; created where it is missing.
        tokenizer: in place of the model's own; None: that.
        token: of the hub; None or "": HF_TOKEN, or that of the login.
        private: whether a new repository is.
        commit_message: of the commit; None: the hub's own.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: nothing is trained, or repo_id is no name for the hub.
        OSError: the hub's errors.
    """
    return _pushed(repo_id, lambda folder: save_pretrained(model, folder, tokenizer), token, private, commit_message)


def push_to_hub_merged(
    model: LanguageModel,
    repo_id: str,
    tokenizer: Any = None,
    save_method: str | None = None,
    *,
    token: str | None = None,
    private: bool = False,
    commit_message: str | None = None,
    **settings: Any,
) -> str:
    """Upload what `save_pretrained_merged` writes.

    Args:
        model: as of `save_pretrained_merged`.
        repo_id: as of `push_to_hub`.
        tokenizer: as of `push_to_hub`.
        save_method: as of `save_pretrained_merged`.
        token: as of `push_to_hub`.
        private: as of `push_to_hub`.
        commit_message: as of `push_to_hub`.
        settings: further ones of `save_pretrained_merged`.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: as of `save_pretrained_merged`.
        OSError: the hub's errors.
    """

    def write(folder: Path) -> Any:
        save_pretrained_merged(model, folder, tokenizer, save_method, **settings)

    return _pushed(repo_id, write, token, private, commit_message)


def push_to_hub_gguf(
    model: LanguageModel,
    repo_id: str,
    tokenizer: Any = None,
    quantization_method: str | list[str] | None = None,
    *,
    token: str | None = None,
    private: bool = False,
    commit_message: str | None = None,
    **settings: Any,
) -> str:
    """Upload what `save_pretrained_gguf` writes.

    Args:
        model: as of `save_pretrained_gguf`.
        repo_id: as of `push_to_hub`; the file is named by it.
        tokenizer: as of `push_to_hub`.
        quantization_method: as of `save_pretrained_gguf`.
        token: as of `push_to_hub`.
        private: as of `push_to_hub`.
        commit_message: as of `push_to_hub`.
        settings: further ones of `save_pretrained_gguf`.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: as of `save_pretrained_gguf`.
        OSError: the hub's errors.
    """

    def write(folder: Path) -> Any:
        save_pretrained_gguf(model, folder, tokenizer, quantization_method, **settings)

    return _pushed(repo_id, write, token, private, commit_message)


def _pushed(
    repo_id: str, write: Callable[[Path], Any], token: str | None, private: bool, commit_message: str | None
) -> str:
    """Upload a folder that is written for it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id: expected organisation/name, or a name, got {shown(repo_id)}: {error}") from None
    api = HfApi(token=token or None)
    api.create_repo(repo_id, private=private, exist_ok=True)  # before anything is written, which may take long
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / Path(repo_id).name
        write(folder)
        card = folder / CARD
        text = card.read_text("utf-8")
        if (folder / ADAPTER_CONFIG).is_file():  # whose base `chat` finds in a folder alone
            text = text.replace(f"fastjax chat {folder.name}\n", "")
        card.write_text(renamed(text, folder.name, repo_id), encoding="utf-8")
        if api.file_exists(repo_id, CARD) and is_foreign(Path(api.hf_hub_download(repo_id, CARD))):
            print(f"note: {repo_id} has a {CARD} that is not fastjax's, which stays as it is", file=sys.stderr)
            card.unlink()
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))
