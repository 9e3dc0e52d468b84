"""The version that the stand-in says it is."""

__version__ = "1.3.0-standin"
