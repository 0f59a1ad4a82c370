"""Jobs over a collection, spread over Spark's cores: `python -m spark_connector.jobs.<name>`.

`spark-submit` runs a job's file, with the file's folder first on the path. There `backup.py` would
hide the package `backup`: so a job that is run as a file takes its folder off.

Floors, from the top:

    backup compact restore verify    one job each
    command copies tasks             what all jobs share
"""
