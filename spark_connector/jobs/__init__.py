"""Jobs over a collection, spread over Spark's cores: `python -m kvstore.spark.jobs.<name>`.

`spark-submit` runs the file of a job, with the file's folder first on the path. There `backup.py`
would hide the package `backup`. So a job that is run as a file takes its folder off the path.
"""
