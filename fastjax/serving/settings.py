"""Settings of a server: where it listens, who may ask, and how much."""

import dataclasses
import ipaddress
import re
from typing import Annotated, Literal

from annotated_types import Interval, MinLen

from fastjax.errors import ConfigError
from fastjax.options import checked
from fastjax.options.kinds import Count, Positive

#: Names of this machine to itself.
LOCAL_NAMES = ("localhost",)


@checked("")
class ServerSettings:
    """How a server listens and what it allows.

    Raises:
        ConfigError: a setting out of its range; a host that others reach, and no key.
    """

    name: Annotated[str, MinLen(1)] = "model"
    """the name of the model without a named adapter, as `model` in requests."""
    host: Annotated[str, MinLen(1)] = "127.0.0.1"
    """the address to listen on; any but this machine's own needs a key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """the port; 0: any free one."""
    key: Annotated[str, MinLen(16)] | None = dataclasses.field(default=None, repr=False)
    """asked of every request but /health and the page's own files, as `Authorization: Bearer KEY`; at least 16
    characters."""
    allowed_hosts: list[str] = dataclasses.field(default_factory=list)
    """names in the header `Host` that are answered beside IP addresses and localhost."""
    adapters: list[str] = dataclasses.field(default_factory=list)
    """folders, from which alone adapters are loaded."""
    special_tokens: Literal["text", "control"] = "text"
    """what special tokens in texts of requests are read as; "control" is for texts that one trusts."""
    run: str | None = None
    """the folder of a run whose curves the page shows."""
    queue: Annotated[int, Interval(ge=0)] = 256
    """answers that may wait for a row; more are refused with 429."""
    answers: Annotated[int, Interval(ge=1, le=4096)] = 128
    """answers of one request, over its prompts and `n`."""
    body_bytes: Count = 8 * 2**20
    """of a request's body."""
    bodies_bytes: Count = 64 * 2**20
    """of all bodies that are being read at a time."""
    header_bytes: Count = 64 * 2**10
    """of a request's line and headers."""
    connections: Count = 1024
    """open at a time."""
    header_seconds: Positive = 10.0
    """in which a request's headers must have come."""
    body_seconds: Positive = 30.0
    """in which a request's body must have come."""
    write_seconds: Positive = 30.0
    """in which a reader must take what is sent, up to 64 KiB in advance; a slower one is cut."""
    request_seconds: Positive = 600.0
    """from a request to the end of its answers."""
    drain_seconds: Positive = 60.0
    """for the answers that are under way when the server is asked to end."""

    def __post_init__(self) -> None:
        if self.key is not None and not re.fullmatch("[!-~][ -~]*[!-~]", self.key):
            raise ConfigError("key: expected ASCII without spaces around it, which clients can send, got others")
        if not is_local(self.host) and self.key is None:
            raise ConfigError(
                f"host: expected an address of this machine alone without a key, such as 127.0.0.1, got {self.host}; "
                "put a key into the environment variable FASTJAX_API_KEY or a file (--api_key_file)"
            )


def is_local(host: str) -> bool:
    """Whether an address, or a name, is this machine's own to itself.

    Args:
        host: of a listener.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOCAL_NAMES
