"""Preference training: DPO and its relatives."""

__version__ = "1.0.0"
