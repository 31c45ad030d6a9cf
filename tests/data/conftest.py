"""Views of preference data that tests read."""

from __future__ import annotations

from dpo.data.schema import PreferenceData


def view(field: str) -> property:
    """A field of the entries that have it, by prompt."""
    return property(lambda data: {prompt: entry[field] for prompt, entry in data.items() if field in entry})


for field in ("weights", "margins", "rows", "messages", "tools", "cuts"):
    setattr(PreferenceData, field, view(field))
