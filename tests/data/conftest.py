"""Views of preference data that tests read."""

from dpo.data.schema import PreferenceData


def view(field: str) -> property:
    """A field of the last record of each prompt that has it."""
    return property(
        lambda data: {
            prompt: value for prompt, entry in data.items() if (value := getattr(entry["records"][-1], field))
        }
    )


for field in ("messages", "tools", "weight"):
    setattr(PreferenceData, field, view(field))
