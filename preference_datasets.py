"""The reference code's name of `dpo.preference_datasets`: `import preference_datasets` gives that module."""

import sys

from dpo import preference_datasets

sys.modules[__name__] = preference_datasets
