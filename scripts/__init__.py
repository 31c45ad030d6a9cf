"""`python -m scripts.NAME` runs `dpo NAME`: the commands' names from before there was the command `dpo`."""

import sys

from dpo import commands

__path__ += commands.__path__  # so that `import scripts.NAME` finds the command's module
if sys.argv[0] == "-m":  # Python imports this package to find one of its modules, whose name only `orig_argv` has
    name = sys.orig_argv[-len(sys.argv)].removeprefix("scripts.")
    if name in commands.COMMANDS:
        sys.exit(commands.main([name, *sys.argv[1:]]))
