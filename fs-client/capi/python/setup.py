"""What pyproject.toml cannot say: the wheel has a library of one platform, and suits every Python 3."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    version=os.environ["CUTTLEFS_VERSION"],
    packages=["cuttlefs"],
    package_data={"cuttlefs": ["libcuttlefs.so"]},
    distclass=WithLibrary,
    cmdclass={"bdist_wheel": Wheel},
)
