"""DataFrames into a store: files that Spark builds, and one import that adds them."""
