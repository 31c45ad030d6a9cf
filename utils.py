"""The reference code's name of `dpo.utils`: `import utils` gives that module."""

import sys

from dpo import utils

sys.modules[__name__] = utils
