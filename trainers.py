"""The reference code's name of `dpo.trainers`: `import trainers` gives that module."""

import sys

from dpo import trainers

sys.modules[__name__] = trainers
