"""The host library, played on a CPU, for the tests that need it."""

import played_driver
import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return played_driver.library(tmp_path_factory.mktemp("launcher"))
