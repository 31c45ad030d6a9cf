"""Reads the records of runs: curves, findings, the ledger, the report."""
