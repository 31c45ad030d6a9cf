"""`python train.py ...` is `dpo train ...`; `import train` gives the module `dpo.train`."""

import sys

if __name__ == "__main__":
    from dpo.commands import main

    sys.exit(main(["train", *sys.argv[1:]]))
else:
    from dpo import train

    sys.modules[__name__] = train
