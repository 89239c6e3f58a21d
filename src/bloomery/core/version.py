"""The version of Bloomery, which runs, reports and calibrations record."""

__version__ = "0.1.0"
