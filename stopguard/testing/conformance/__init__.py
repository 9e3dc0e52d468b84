"""The adapter conformance suite, for our adapters and for other people's (docs/conformance.md).

::

    @pytest.fixture(scope="module")
    def subject() -> Iterator[Subject]:
        with Subject("myengine", "http://127.0.0.1:8000") as subject:
            yield subject


    class TestMyEngine(Conformance):
        pass
"""

from stopguard.testing.conformance.subject import Closed, GaugeReading, Subject
from stopguard.testing.conformance.suite import Conformance

__all__ = ["Closed", "Conformance", "GaugeReading", "Subject"]
