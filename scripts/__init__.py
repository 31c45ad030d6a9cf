from dpo.system.entry import open_standard_streams

open_standard_streams()  # before a script imports modules that open files
