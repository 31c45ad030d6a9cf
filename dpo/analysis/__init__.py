"""Analysis of a run's records: curves, findings, the ledger, the report."""
