"""The release of this library, in one place: packaging, the shell and `kvstore.__version__`."""

__version__ = "0.1.0"
