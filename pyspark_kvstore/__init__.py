"""The package by which PySpark finds `spark.read.format("kvstore")` without a call of our library.

When a session first uses a Python data source, PySpark imports all packages whose names begin with
`pyspark_`, and looks for a `DefaultSource` in them. So this package imports little.
"""

from pyspark_kvstore.default_source import DefaultSource

__all__ = ["DefaultSource"]
