"""Adapters of a running server: loaded from the folders named at its start, and dropped, with the key alone.

A client says a folder's name, never a path. The folder counts by where it really lies: a link that leads out of the
named folder, in it or as it, is as if there were nothing.
"""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from convert.adapter_config import CONFIG
from convert.errors import ConvertError, shown
from fastjax.errors import ConfigError, DataError
from fastjax.language_model import FastLanguageModel
from fastjax.serving import fields
from fastjax.serving.errors import ApiError
from fastjax.serving.model import Models, ServedModel
from fastjax.serving.settings import ServerSettings
from fastjax.serving.worker import Worker

_LOG = logging.getLogger("fastjax.serving")

#: The names that an adapter and its folder may have.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Adapters:
    """Loads and drops adapters."""

    def __init__(self, worker: Worker, models: Models, settings: ServerSettings):
        """Begin.

        Args:
            worker: whose engine has slots for them.
            models: that may be asked for; adapters join them.
            settings: of the server, with the folders.

        Raises:
            ConfigError: a folder that is none.
        """
        self._worker, self._models, self._settings = worker, models, settings
        self._lock = asyncio.Lock()
        self._roots = [Path(folder).resolve() for folder in settings.adapters]
        for root in self._roots:
            if not root.is_dir():
                raise ConfigError(f"adapters: expected a folder of adapters, got {shown(str(root))}")

    def load_all(self) -> None:
        """Load every adapter in the folders, before requests come.

        Raises:
            ConfigError, ConvertError: of one that does not fit, finds no slot, or has a name that is taken.
        """
        for root in self._roots:
            for folder in sorted(root.iterdir()):
                if _NAME.fullmatch(folder.name) and (found := _inside(root, folder.name)) is not None:
                    if folder.name in self._models.names:
                        problem = f"expected a name that is not taken, got {shown(str(folder))}; rename it, or --name"
                        raise ConfigError(f"adapters: {problem}")
                    self._load(folder.name, found)

    async def load(self, http: Request) -> Response:
        """POST /v1/load_lora_adapter: a folder under a name."""
        found = self._fields(await http.body(), "lora_name")
        name, path = found["lora_name"], found.get("lora_path", found["lora_name"])
        self._check_name(name)
        folder = self._folder(path)
        async with self._lock:
            self._check_name(name)
            try:
                await asyncio.to_thread(self._load, name, folder)
            except (ConfigError, ConvertError, DataError) as error:
                _LOG.warning("adapter %s: %s", name, error)
                raise ApiError(400, f"lora_path: {_plain(error, folder, path)}", param="lora_path") from None
        return JSONResponse({"id": name, "object": "model", "parent": self._models.base})

    async def unload(self, http: Request) -> Response:
        """POST /v1/unload_lora_adapter: its answers end on it, and no more are begun."""
        name = self._fields(await http.body(), "lora_name")["lora_name"]
        async with self._lock:
            if self._models.adapter(name) is None:
                raise ApiError(400, "lora_name: expected an adapter, got the model itself", param="lora_name")
            self._models[name]  # 404 where there is none
            self._models.remove(name)
            await asyncio.wrap_future(self._worker.call(lambda engine: engine.drop_adapter(name)))
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    def _fields(self, body: bytes, *needed: str) -> dict[str, Any]:
        """A body's fields, for one who has the key."""
        if self._settings.key is None:
            raise ApiError(403, "adapters are loaded and dropped with a key alone; start the server with one")
        found = fields.read(fields.parse(body), fields.LOAD)
        for name in needed:
            if name not in found:
                raise ApiError(400, f"{name}: expected a name, got none", param=name)
        return found

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            message = f"lora_name: expected letters, digits, '.', '_' and '-', at most 128, got {shown(name, 80)}"
            raise ApiError(400, message, param="lora_name")
        if name in self._models.names:
            message = f"lora_name: expected a name that is not taken, got {name}; unload it first"
            raise ApiError(400, message, param="lora_name")

    def _folder(self, name: str) -> Path:
        """The folder of an adapter; the refusal tells nothing of what is there."""
        if _NAME.fullmatch(name):
            for root in self._roots:
                if (found := _inside(root, name)) is not None:
                    return found
        message = "lora_path: expected the name of an adapter in the folders of --adapters, got none of these"
        raise ApiError(404, message, param="lora_path", code="adapter_not_found")

    def _load(self, name: str, folder: Path) -> None:
        """Read an adapter and hand it to the engine."""
        model = FastLanguageModel.load_adapter(self._worker.model, folder).value
        known = ServedModel(model, self._settings)
        self._worker.call(lambda engine: engine.load_adapter(name, model)).result()
        self._models.add(name, known)


def _inside(root: Path, name: str) -> Path | None:
    """The folder of a name in a root, if it and all its files really lie there and it is an adapter's."""
    folder = (root / name).resolve()
    if not folder.is_relative_to(root) or not (folder / CONFIG).is_file():
        return None
    return folder if all(each.resolve().is_relative_to(root) for each in folder.rglob("*")) else None


def _plain(error: Exception, folder: Path, name: str) -> str:
    """A refusal without the machine's paths."""
    return str(error).replace(str(folder), name).replace(str(folder.parent), "")
