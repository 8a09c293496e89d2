"""Every Python with this folder in PYTHONPATH measures briefly."""

from importlib import import_module

from changes import CHANGES

for path, value in CHANGES.items():
    module, _, name = path.rpartition(".")
    getattr(import_module(module), name)  # there is such a name
    setattr(import_module(module), name, value)
