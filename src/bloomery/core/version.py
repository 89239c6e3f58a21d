"""The version of this program, which runs, reports and measurements record."""

__version__ = "0.1.0"
