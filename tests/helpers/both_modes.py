"""The fixture of ``nccl_late``: there for all tests of the module that imports it, and for no process of a rank."""

import pytest
from nccl_late import TELLS_LATE


@pytest.fixture(params=["at once", "later"], autouse=True)
def tells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both modes of the miniature NCCL, for all tests of the module that imports this."""
    if request.param == "later":
        monkeypatch.setenv(TELLS_LATE, str(len(request.node.name)))
    return str(request.param)
