import sys

from dpo.commands import main

sys.exit(main())
