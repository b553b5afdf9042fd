"""One server for the tests that ask it, with two adapters, a key and a small queue; and a browser."""

import pytest

from fastjax.generation import engine as engine_module
from tests.support import browser as chromium
from tests.support import serving


@pytest.fixture(scope="module", autouse=True)
def one_width():
    """One program for all prompts, as long as a row of `serving.LENGTH`, and one for all rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CHUNK": 256, "LEAST": 256, "WIDTHS": (serving.ROWS, 512)}.items():
            patch.setattr(engine_module, name, value)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    serving.write_adapters(folder)
    engine = serving.engine(adapter_slots=3, adapter_rank=4, prefill_tokens=256)  # as `one_width` has it, made later
    with serving.served(engine, key=serving.KEY, adapters=[str(folder)], body_bytes=2**20) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium.chromium() as started:
        yield started


@pytest.fixture
def opened(browser):
    with chromium.pages(browser) as open_page:
        yield open_page
