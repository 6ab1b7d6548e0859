"""The wheel: the repository's files in one folder, `lockstep`; pyproject.toml has the rest.

Top-level packages called `data`, `models` and `utils` would break other packages, so `__main__.py` finds them here.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py


class BuildTree(build_py):
    """Leaves this file out, and makes the folder a package: otherwise a folder `lockstep` elsewhere could join it."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != "setup"]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            text = '"""Lockstep, as pip installs it; `python -m lockstep --folder` prints where."""\n'
            (Path(self.build_lib) / "lockstep" / "__init__.py").write_text(text)


FOLDERS = ("accelerate_configs", "data", "models", "utils")
patterns = [*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)]  # not the folder datasets
packages = find_namespace_packages(include=patterns, exclude=["*.__pycache__*"])
setup(
    packages=["lockstep", *(f"lockstep.{name}" for name in packages)],
    package_dir={"lockstep": "."},
    package_data={"": ["*.yaml", "*.sbatch", "*.sh", "docs/*.md"]},
    cmdclass={"build_py": BuildTree},
)
