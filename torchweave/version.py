"""The package's version and folder, for modules that must not import the public names."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE_FOLDER = Path(__file__).resolve().parent
