"""The home of whole runs, as for the pipeline tests."""

from tests.pipeline.conftest import home

__all__ = ["home"]
