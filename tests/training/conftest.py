from __future__ import annotations

import pytest
from training_pair import Pair, random_pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return random_pair()
