from dpo.system.host import open_standard_streams

open_standard_streams()  # before a script imports modules that open files
