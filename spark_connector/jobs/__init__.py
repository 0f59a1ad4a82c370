"""Jobs over a collection, spread over Spark's cores: `python -m spark_connector.jobs.<name>`."""
