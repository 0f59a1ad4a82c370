"""Makes `spark.read.format("kvstore")` known without any code.

PySpark scans packages whose names begin with `pyspark_` for `DefaultSource` when a session first
uses a Python data source: every such session imports this, so it is light.
"""

from pyspark_kvstore.default_source import DefaultSource

__all__ = ["DefaultSource"]
