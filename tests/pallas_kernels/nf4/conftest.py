import warnings

import pytest


@pytest.fixture
def bitsandbytes():
    """Its functions on CPU, uncompiled: torch.compile takes longer than all of these tests."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports' warnings are not this project's
        with torch.compiler.set_stance("force_eager"):
            yield pytest.importorskip("bitsandbytes.functional")
