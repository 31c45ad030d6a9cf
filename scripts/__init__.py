import sys

from dpo.system.host import open_standard_streams, print_whatever_happens

open_standard_streams()  # before a script imports modules that open files
if sys.argv[0] == "-m":  # so while Python looks for the module of `python -m scripts.NAME`
    print_whatever_happens()
