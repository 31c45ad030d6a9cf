"""Python files of the user: run as modules named like the file, and hashed."""

import hashlib
import importlib.util
import modulefinder
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dpo.errors import InputError, explaining, one_sentence
from dpo.system.plain_files import check_readable
from dpo.system.signals import Stopped


def load_module(file: Path, problem: str) -> ModuleType:
    """Run a Python file, which may import modules beside it, and return its module, named like the file.

    A file that is already the module of its name is not run again. If a file fails, this raises an InputError whose
    message begins with `problem`.
    """
    name = file.stem
    with explaining(OSError, lambda why: InputError(f"{problem}: {why}")):
        check_readable(file)  # opening a FIFO would block
    # Without an explicit loader, there would be no spec for a file whose suffix is not .py.
    spec = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))
    former = sys.modules.get(name)
    if former and getattr(former, "__file__", None) == str(file):
        return former
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses and pickle look the module up there
    sys.path.append(str(file.parent))  # for imports of modules beside the file, and so that workers find it by its name
    try:
        run_users_code(lambda: spec.loader.exec_module(module), InputError, problem, file)
    except InputError:
        if sys.modules.get(name) is module:  # a second call must not return a module that has run in part
            del sys.modules[name]
        raise
    return module


def run_users_code(code: Callable, error_class: type[Exception], problem: str, file: Path | None) -> Any:
    """Return what `code()` returns. Its errors become an `error_class`, with the `problem` and the line in `file`.

    If `file` is None, the line is the one that raised the error.
    """
    try:
        return code()
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit, if the code raises it
        message = f"{problem}: {type(error).__name__}: {one_sentence(error)}"
        frames = traceback.extract_tb(error.__traceback__)
        if frames := [frame for frame in frames if file is None or frame.filename == str(file)]:
            message += f" ({frames[-1].filename}, line {frames[-1].lineno})"
        raise error_class(message) from error


class _Finder(modulefinder.ModuleFinder):
    """Finds the modules that a script imports, as ModuleFinder does, also from directories without `__init__.py`.

    ModuleFinder fails at such a directory. So all Python files below it are added to `namespace_files`, and it counts
    as a missing module.
    """

    def __init__(self, folder: Path):
        super().__init__(path=[str(folder)])
        self.namespace_files: set[Path] = set()

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        for folder in path or self.path:
            package = Path(folder, name)
            has_module = (package / "__init__.py").exists() or package.with_suffix(".py").exists()
            if package.is_dir() and not has_module:
                self.namespace_files.update(package.rglob("*.py"))
                raise ImportError(name)  # the base class notes it as a missing module, and goes on
        return super().find_module(name, path, parent)


def hash_code(file: Path) -> str:
    """Return a digest of a Python file and of the files that it imports from its directory, also inside functions."""
    finder = _Finder(file.parent)
    finder.run_script(str(file))
    paths = finder.namespace_files | {Path(module.__file__) for module in finder.modules.values() if module.__file__}
    contents = sorted((os.path.relpath(path, file.parent), path.read_bytes()) for path in paths)
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def hash_files(files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files, whatever their order."""
    return hashlib.sha256(repr(sorted((file.name, file.read_bytes()) for file in files)).encode()).hexdigest()
