"""What pyproject.toml cannot say: the module that ``import torch`` calls is a real file in every installation.

An editable installation would only point to the checkout, and where that is not mounted (a compute node) every ``import
torch`` of the environment would fail. So it gets a copy, beside the other installed modules.
"""

import sys
import sysconfig

from setuptools import Distribution, setup

LEAF = "dynamiccl_autoload"


class WithData(Distribution):
    """Editable installations ask for this and install data files then; the base class has another name for it."""

    def has_data(self):
        """Whether there are data files."""
        return bool(self.data_files)


if "editable_wheel" in sys.argv:
    folder = sysconfig.get_path("purelib", vars={"base": "", "platbase": ""}).strip("/")
    setup(distclass=WithData, data_files=[(folder, [f"{LEAF}.py"])])
else:
    setup(py_modules=[LEAF])
