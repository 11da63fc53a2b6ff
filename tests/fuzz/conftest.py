"""The session of the tests here: starting it takes ten seconds."""

import pytest

from tests.fuzz.session import started


@pytest.fixture(scope="package")
def session():
    with started() as session:
        yield session
